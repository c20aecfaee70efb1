"""Where a model's or a tokenizer's files are: in a local directory, or downloaded from the hub."""

from collections.abc import Sequence
from pathlib import Path

TOKENIZER_PATTERNS = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
MODEL_PATTERNS = (*TOKENIZER_PATTERNS, "*.safetensors")


def local_directory(option: str, source: str, revision: str | None = None) -> Path | None:
    """The local directory `source`, in which `~` is the user's home; None if it may be a hub id.

    `option` names the source in errors. A `revision` of a local directory is a ValueError.
    """
    try:
        path = Path(source).expanduser()
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"{option} must be a directory, but {source!r} is a file")
        is_local = path.is_dir()
    except (RuntimeError, ValueError) as error:  # an unknown ~user, or a NUL in the path
        raise FileNotFoundError(f"{option} directory {source!r} cannot exist: {error}") from None
    if not is_local:
        if source.startswith(("/", ".", "~")):
            raise FileNotFoundError(f"{option} directory {source!r} does not exist")
        return None
    if revision is not None:
        raise ValueError(
            f"revision={revision!r} is one of the hub, but {option} {source!r} is a local directory"
        )
    return path


def download(
    option: str,
    source: str,
    files: Sequence[str],
    revision: str | None = None,
    download_dir: str | None = None,
) -> Path:
    """The directory with the files of the hub id `source` that match one of `files`.

    `revision` is a branch, a tag or a commit, by default the main branch. Downloads are kept in
    `download_dir`, by default in the hub's cache.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                source,
                revision=revision,
                cache_dir=None if download_dir is None else Path(download_dir).expanduser(),
                allow_patterns=list(files),
            )
        )
    except Exception as error:  # the hub has a class each for offline, unknown and gated
        what = "it" if revision is None else f"its revision {revision!r}"
        raise OSError(
            f"{option} {source!r} is not a local directory, and downloading {what} failed: {error}"
        ) from error
