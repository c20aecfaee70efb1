"""The format of GGUF files: what is read, what is refused, and damaged files."""

import random
import struct
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
    """A file may say that its tensors begin at any byte, or at multiples of 4096."""
    (expected,) = read_gguf(file)
    for alignment, name in ((1, "a"), (1, "ab"), (1, "abc"), (4096, "a")):
        path = tmp_path / f"{alignment}-{name}.gguf"
        changes = {"general.alignment": alignment, "general.name": name}
        write_gguf(model, path, changes=changes)
        (found,) = read_gguf(path)
        assert all(torch.equal(found[name][...], expected[name][...]) for name in expected)


def test_version_2_is_read(file: Path) -> None:
    expected = open_gguf(file).tensors
    data = file.read_bytes()
    file.write_bytes(data[:4] + struct.pack("<I", 2) + data[8:])
    assert open_gguf(file).tensors == expected


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"GGML", r"m.gguf is no GGUF file: it begins with b'GGML'"),
        (4, struct.pack("<I", 1), "version 1 of GGUF; 2 and 3 are supported"),
        (4, struct.pack("<I", 4), "version 4 of GGUF; 2 and 3 are supported"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 10_000), "number of tensors is 10,000, at byte 8 of"),
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


def test_a_file_that_ends_in_its_header_is_named(file: Path) -> None:
    """Each field is read by a check of its own."""
    data = file.read_bytes()
    for size in range(4, 400):
        file.write_bytes(data[:size])
        with pytest.raises(OSError, match=rf"{file} is truncated or damaged"):
            open_gguf(file)


def test_arrays_in_arrays_are_passed_over(tmp_path: Path) -> None:
    """Many levels would end the process: Python's stack is limited."""
    path, header = tmp_path / "m.gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 2)
    level, last = struct.pack("<IQ", 9, 1), struct.pack("<IQB", 0, 1, 7)
    for depth in (3, 5000):
        array = struct.pack("<Q1sI", 1, b"a", 9) + level * depth + last
        path.write_bytes(header + array + struct.pack("<Q1sIB", 1, b"b", 0, 5))
        if depth == 3:
            assert open_gguf(path).metadata["b"] == 5
            continue
        with pytest.raises(OSError, match="a has arrays in arrays, more than 4 levels"):
            open_gguf(path)


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
        ({"llama.expert_count": 8}, "the metadata have no key llama.expert_used_count"),
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
    with pytest.raises(ValueError, match=r"'gemma9' is not supported; llama, .*smollm3, .* are"):
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
