"""The directory that is made of a GGUF file, and where the file comes from."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import make_model
from gguf_files import write_gguf

from nanovllm import LLM
from nanovllm.models.checkpoint import resolve_model, weight_files
from nanovllm.models.gguf import directory
from nanovllm.models.gguf.directory import gguf_directory
from nanovllm.models.loader import read_weights


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return make_model(path, family="Llama", num_hidden_layers=1, hidden_size=32)


@pytest.fixture
def file(model: Path, tmp_path: Path) -> Path:
    write_gguf(model, tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def test_a_directory_is_made_once(file: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a large vocabulary takes a second; a changed file must be read again."""
    first = gguf_directory(file)
    assert resolve_model(str(file)) == first
    assert (first / file.name).resolve() == file
    with monkeypatch.context() as patch:
        patch.setattr(directory, "open_gguf", None)  # nothing of the file is read
        assert gguf_directory(file) == first
    time.sleep(0.01)
    write_gguf(model, file, changes={"llama.context_length": 77})
    second = gguf_directory(file)
    assert (
        second != first and '"max_position_embeddings": 77' in (second / "config.json").read_text()
    )


@pytest.mark.parametrize("lost", ["config.json", "m.gguf"])
def test_an_incomplete_directory_is_made_again(file: Path, lost: str) -> None:
    made = gguf_directory(file)
    (made / lost).unlink()
    if lost == "m.gguf":
        (made / lost).symlink_to(file.with_name("away"))
    assert gguf_directory(file) == made and (made / lost).exists()
    assert (made / "m.gguf").samefile(file)


def test_processes_make_a_directory_at_the_same_time(file: Path, cache: Path) -> None:
    """Each sees a whole directory, and none is left half made."""
    code = "import sys; from pathlib import Path; from nanovllm.models.gguf.directory import *;"
    code += "print((gguf_directory(Path(sys.argv[1])) / 'config.json').stat().st_size)"
    args = [sys.executable, "-c", code, str(file)]
    started = [subprocess.Popen(args, stdout=subprocess.PIPE) for _ in range(3)]
    sizes = {process.communicate()[0] for process in started}
    assert len(sizes) == 1 and int(sizes.pop()) > 0
    assert len([*cache.iterdir()]) == 1


def test_a_folder_that_others_may_write_is_not_used(
    file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could replace the chat template, or the links."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    made = gguf_directory(file)
    assert made.parent == tmp_path / f"nanovllm-gguf-{os.geteuid()}"
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    monkeypatch.setenv("NANOVLLM_CACHE", str(file))  # no folder can be made there
    assert gguf_directory(file) == made


def test_where_directories_are_kept(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NANOVLLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert gguf_directory(file).parent == tmp_path / "xdg" / "nanovllm" / "gguf"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert gguf_directory(file).parent == tmp_path / "home" / ".cache" / "nanovllm" / "gguf"


def test_recommended_sampling(model: Path, tmp_path: Path) -> None:
    changes = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    write_gguf(model, tmp_path / "m.gguf", changes=changes)
    llm = LLM(str(tmp_path / "m.gguf"), enforce_eager=True, max_model_len=32)
    found = llm.get_default_sampling_params()
    llm.close()
    assert (found.temperature, found.top_k) == (0.6, 20)


@pytest.mark.parametrize("what", ["missing", "dangling", "fifo", "directory"])
def test_other_things_with_the_name_of_a_file(tmp_path: Path, what: str) -> None:
    path = tmp_path / "m.gguf"
    if what == "dangling":
        path.symlink_to("nowhere")
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    with pytest.raises(OSError, match=r"m\.gguf"):
        LLM(str(path))


def test_a_folder_with_a_file_names_the_file(file: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist; .* or give .*m.gguf"):
        LLM(str(file.parent))


def test_a_missing_file_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("m.gguf", "models/m.gguf", "./m.gguf", "models/old/m.GGUF"):
        with pytest.raises(FileNotFoundError, match=rf"^model file '{name}' does not exist$"):
            LLM(name)


@pytest.mark.parametrize(("split", "number"), [(0, 1), (6, 2)])
def test_the_end_of_a_name_may_have_capital_letters(
    model: Path, tmp_path: Path, split: int, number: int
) -> None:
    """It was refused as no GGUF file."""
    write_gguf(model, tmp_path / "m.gguf", split=split)
    files = sorted(tmp_path.glob("m*.gguf"))
    capitals = [file.rename(file.with_suffix(".GGUF")) for file in files]
    made = gguf_directory(capitals[0])
    assert resolve_model(str(capitals[0])) == made
    assert weight_files(made) == [made / file.name for file in files] and len(files) == number
    assert sum(map(len, read_weights(made))) > 6
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist; .* or give .*\.GGUF"):
        LLM(str(tmp_path))


# The hub


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A repository with some files, and what was asked of it."""
    path, asked = tmp_path / "hub", dict[str, Any]()
    path.mkdir()
    for name in ("M-Q8_0.gguf", "M-Q4_K_M.gguf", "M.Q4_0.gguf", "M-Q6_K.gguf", "N-Q6_K.gguf"):
        write_gguf(model, path / name)
    write_gguf(model, path / "L-Q8_0.GGUF")
    write_gguf(model, path / "M-F16.gguf", split=6)

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


@pytest.mark.parametrize(
    ("chosen", "file"),
    [
        ("Q4_K_M", "M-Q4_K_M.gguf"), ("q8_0", "M-Q8_0.gguf"), ("Q4_0", "M.Q4_0.gguf"),
        ("M-Q8_0.gguf", "M-Q8_0.gguf"), ("F16", "M-F16-00001-of-00002.gguf"),
        ("M-F16-00001-of-00002.gguf", "M-F16-00001-of-00002.gguf"),
        ("L-Q8_0.GGUF", "L-Q8_0.gguf"),
    ],
)  # fmt: skip
def test_a_file_of_a_repository(hub: dict[str, Any], chosen: str, file: str) -> None:
    found = resolve_model(f"owner/repo:{chosen}", revision="main", download_dir="/d")
    assert sorted(found.glob("*.gguf"))[0].name == file
    assert hub["repo_id"] == "owner/repo" and hub["revision"] == "main"
    assert hub["cache_dir"] == Path("/d") and all(
        "gguf" in p.lower() for p in hub["allow_patterns"]
    )


def test_which_file_of_a_repository_must_be_clear(hub: dict[str, Any]) -> None:
    with pytest.raises(FileNotFoundError, match=r"owner/repo has no GGUF file for 'Q2_K'"):
        resolve_model("owner/repo:Q2_K")
    with pytest.raises(FileNotFoundError, match=r"several files for 'Q6_K': M-.*, N-Q6_K\.gguf"):
        resolve_model("owner/repo:Q6_K")
