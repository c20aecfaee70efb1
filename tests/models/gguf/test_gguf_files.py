"""The format of GGUF files: what is refused, damaged files, and the directory that is made."""

import os
import random
import stat
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from gguf import GGUFWriter
from gguf_files import write_gguf

from nanovllm import LLM
from nanovllm.models.checkpoint import resolve_model
from nanovllm.models.gguf import directory
from nanovllm.models.gguf.directory import gguf_directory
from nanovllm.models.gguf.reader import Array
from nanovllm.models.gguf.split import open_gguf
from nanovllm.models.gguf.tensors import read_gguf


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


# The format


def test_all_kinds_of_values(tmp_path: Path) -> None:
    """A type of another width would shift all that follows."""
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    values: dict[str, tuple[str, Any]] = {
        "a": ("uint8", 200), "b": ("int8", -100), "c": ("uint16", 60_000), "d": ("int16", -30_000),
        "e": ("uint32", 4_000_000_000), "f": ("int32", -2_000_000_000), "g": ("float32", 0.1),
        "h": ("bool", True), "i": ("string", "é\n"), "j": ("array", [1, -2]),
        "k": ("uint64", 1 << 63), "l": ("int64", -(1 << 62)), "m": ("float64", 0.1),
        "n": ("array", ["x", "", "ü"]), "o": ("array", [0.5, 1e-5]), "p": ("array", [True, False]),
    }  # fmt: skip
    for key, (kind, value) in values.items():
        getattr(writer, f"add_{kind}")(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_gguf(tmp_path / "m.gguf").metadata
    read = {k: v.values() if isinstance(v, Array) else v for k, v in found.items() if k in values}
    assert read == {key: value for key, (_, value) in values.items()}
    assert {key: type(value) for key, value in read.items()} == {
        key: type(value) for key, (_, value) in values.items()
    }


def test_other_alignments(model: Path, file: Path, tmp_path: Path) -> None:
    """A file may say that its tensors begin at multiples of 2, or of 4096."""
    (expected,) = read_gguf(file)
    for alignment in (2, 4096):
        path = tmp_path / f"{alignment}.gguf"
        write_gguf(model, path, changes={"general.alignment": alignment})
        (found,) = read_gguf(path)
        assert all(torch.equal(found[name][...], expected[name][...]) for name in expected)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"GGML", r"m.gguf is no GGUF file: it begins with b'GGML'"),
        (4, struct.pack("<I", 1), "version 1 of GGUF; 2 and 3 are supported"),
        (4, struct.pack("<I", 4), "version 4 of GGUF; 2 and 3 are supported"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 60), "number of tensors is 1,152,921,504,606,846,976"),
        (16, struct.pack("<Q", 1 << 40), "number of metadata keys is"),
        (24, struct.pack("<Q", 1 << 33), "the length of a metadata key is"),
    ],
)
def test_a_wrong_header_is_named(file: Path, place: int, value: bytes, message: str) -> None:
    data = bytearray(file.read_bytes())
    data[place : place + len(value)] = value
    file.write_bytes(data)
    with pytest.raises((OSError, ValueError), match=message):
        open_gguf(file)


def test_a_cut_off_file_is_named(file: Path) -> None:
    data = file.read_bytes()
    for size, message in ((len(data) - 1, r"tensor '.*' ends at byte"), (0, "it is empty")):
        file.write_bytes(data[:size])
        with pytest.raises(OSError, match=rf"{file} is truncated or damaged \({message}"):
            open_gguf(file)


def test_an_unknown_type_of_tensors_is_named(model: Path, tmp_path: Path) -> None:
    def types(name: str, shape: tuple[int, ...]) -> str:
        return "TQ2_0" if "ffn_down" in name else "F32"

    wide = make_model(tmp_path / "wide", family="Llama", num_hidden_layers=1, intermediate_size=256)
    write_gguf(wide, tmp_path / "m.gguf", types)
    message = r"tensor 'blk.0.ffn_down.weight' has type TQ2_0, .* F32, .*Q4_K.* are"
    with pytest.raises(ValueError, match=message):
        gguf_directory(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.type": "adapter"}, "general.type must be model, got 'adapter'"),
        ({"llama.attention.scale": 0.5}, "'llama.attention.scale' may change the computation"),
        ({"llama.rope.dimension_sections": [1]}, "may change the computation"),
        ({"llama.expert_count": 8}, "llama.expert_count must be one of .*, got 8"),
        ({"llama.block_count": None}, "no key llama.block_count"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count must be 16, the heads' size"),
        ({"llama.rope.scaling.type": "dynamic"}, "rope.scaling.type must be linear, yarn, or none"),
        ({"llama.attention.value_length": 8}, "value_length must be one of"),
        ({"llama.attention.head_count_kv": [2, 1]}, "layers with different .* are not supported"),
        ({"llama.attention.causal": False}, "causal must be one of"),
        ({"llama.context_length": "x"}, "context_length must be a whole number"),
    ],
)
def test_what_is_not_computed_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_gguf(model, tmp_path / "m.gguf", changes=changes)
    with pytest.raises(ValueError, match=f"m.gguf: .*{message}"):
        gguf_directory(tmp_path / "m.gguf")


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "gemma9")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"'gemma9' is not supported; llama, .*smollm3 are"):
        LLM(str(tmp_path / "m.gguf"))


def damaged_files(data: bytes, header: int, number: int) -> Iterator[bytes]:
    """Files with a few wrong bytes, most of them before the tensors' values, or cut off."""
    rng = random.Random(3)
    for index in range(number):
        made = bytearray(data)
        place = rng.randrange(header)
        match index % 5:
            case 0:
                del made[rng.randrange(len(made)) :]
            case 1:
                made[place] = rng.randrange(256)
            case 2:
                numbers = (1 << 64) - 1, 1 << 62, 1 << 40, 1 << 32, 1 << 31, 1 << 20, 0
                made[place : place + 8] = struct.pack("<Q", rng.choice(numbers))
            case 3:
                del made[place : place + rng.randrange(1, 40)]
            case 4:
                made[place : place + 16] = rng.randbytes(16)
        yield bytes(made)


def test_damaged_files_are_errors(file: Path, cache: Path) -> None:
    """No crash, no other exception, no large allocation, whatever is wrong."""
    data = file.read_bytes()
    header = min(info.start for info in open_gguf(file).tensors.values())
    gguf_directory(file)  # imports
    errors, start = [], time.perf_counter()
    tracemalloc.start()
    try:
        for index, damaged in enumerate(damaged_files(data, header, 200)):
            path = file.with_name(f"damaged{index}.gguf")
            path.write_bytes(damaged)
            try:
                gguf_directory(path)
                for tensors in read_gguf(path):
                    assert all(view.get_shape() for view in tensors.values())
            except (OSError, ValueError) as error:
                errors.append((path.name, str(error)))
            path.unlink()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(errors) > 100 and peak < 100 << 20
    assert [message for name, message in errors if name not in message] == []
    assert time.perf_counter() - start < 60
    assert not [*cache.glob("tmp*")]


# The directory


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


def test_a_missing_file_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("m.gguf", "models/m.gguf"):
        with pytest.raises(FileNotFoundError, match=rf"{name}' does not exist"):
            LLM(name)


# The hub


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A repository with some files, and what was asked of it."""
    path, asked = tmp_path / "hub", dict[str, Any]()
    path.mkdir()
    for name in ("M-Q8_0.gguf", "M-Q4_K_M.gguf", "M.Q4_0.gguf", "M-Q6_K.gguf", "N-Q6_K.gguf"):
        write_gguf(model, path / name)
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
    ],
)  # fmt: skip
def test_a_file_of_a_repository(hub: dict[str, Any], chosen: str, file: str) -> None:
    found = resolve_model(f"owner/repo:{chosen}", revision="main", download_dir="/d")
    assert sorted(found.glob("*.gguf"))[0].name == file
    assert hub["repo_id"] == "owner/repo" and hub["revision"] == "main"
    assert hub["cache_dir"] == Path("/d") and all("gguf" in p for p in hub["allow_patterns"])


def test_which_file_of_a_repository_must_be_clear(hub: dict[str, Any]) -> None:
    with pytest.raises(FileNotFoundError, match=r"owner/repo has no GGUF file for 'Q2_K'"):
        resolve_model("owner/repo:Q2_K")
    with pytest.raises(FileNotFoundError, match=r"several files for 'Q6_K': M-.*, N-Q6_K\.gguf"):
        resolve_model("owner/repo:Q6_K")
