"""GGUF files on the hub: `owner/repo:file.gguf`, or `owner/repo:Q4_K_M`, as vLLM spells it."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from nanovllm.models.file_errors import ANY_CASE
from nanovllm.models.gguf.directory import gguf_directory
from nanovllm.models.gguf.split import PART

Download = Callable[[str, Sequence[str]], Path]  # of a repository's files that match a pattern


def patterns(chosen: str) -> list[str]:
    """The patterns of the files that have a name, or a type such as Q4_K_M."""
    match = PART.fullmatch(chosen)
    if match is not None:
        return [f"{match[1]}-?????-of-{match[3]}{Path(chosen).suffix}"]
    if chosen.lower().endswith(".gguf"):
        return [chosen]
    kinds = dict.fromkeys((chosen, chosen.upper(), chosen.lower()))
    return [f"*[-._]{kind}{end}.gguf" for kind in kinds for end in ("", "-?????-of-?????")]


def download_gguf(source: str, download: Download) -> Path:
    """The directory for the GGUF file that `source` names after a colon, which is downloaded."""
    repository, _, chosen = source.partition(":")
    wanted = patterns(chosen)
    path = download(repository, wanted)
    files = sorted(path.rglob(ANY_CASE))
    found = [f for f in files if any(fnmatch(str(f.relative_to(path)), each) for each in wanted)]
    firsts = [f for f in found if (part := PART.fullmatch(f.name)) is None or int(part[2]) == 1]
    if len(firsts) != 1:
        names = ", ".join(str(file.relative_to(path)) for file in firsts[:5])
        raise FileNotFoundError(
            f"{repository} has several files for {chosen!r}: {names}; name one of them"
            if firsts
            else f"{repository} has no GGUF file for {chosen!r}"
        )
    return gguf_directory(firsts[0])
