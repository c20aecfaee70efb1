"""Replace parts of tensors' names, for families whose files name the modules differently."""

import re
from collections.abc import Mapping


def exchanged(name: str, pieces: Mapping[str, str]) -> str:
    """The name with other parts. Only whole parts between dots match; the longest match applies."""
    ordered = sorted(pieces, key=len, reverse=True)
    pattern = "|".join(re.escape(piece) for piece in ordered)
    return re.sub(rf"(?<![^.])(?:{pattern})(?![^.])", lambda match: pieces[match[0]], name)
