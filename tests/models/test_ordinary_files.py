"""Checkpoints with something else than an ordinary file: an error names it, and nothing hangs."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nanovllm.adapters.adapter import number_of
from nanovllm.adapters.peft import _open
from nanovllm.adapters.peft_config import CONFIG_FILE, read_config
from nanovllm.drafting.eagle3_config import HeadConfig
from nanovllm.drafting.eagle3_files import HEAD_PATTERNS, PICKLED, read_head
from nanovllm.models.bare import lacks_head
from nanovllm.models.checkpoint import (
    INDEX,
    find_directory,
    read_json,
    resolve_model,
    weight_files,
)
from nanovllm.models.config import ModelConfig
from nanovllm.vectors.conventions import MODULES, PROMPTS, read_conventions


def dangle(path: Path) -> None:
    path.symlink_to("../../blobs/1234")


def turn(path: Path) -> None:
    path.symlink_to(path.name)


def fill(path: Path) -> None:
    """A file that is far too large, and takes no room."""
    path.touch()
    os.truncate(path, 1 << 40)


ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "a dangling link": (dangle, r"is a link to '\.\./\.\./blobs/1234', which does not exist"),
    "a circle of links": (turn, "is a link to .* symbolic links"),
    "a directory": (Path.mkdir, "must be an ordinary file, but it is a directory"),
    "a FIFO": (os.mkfifo, "must be an ordinary file, but it is a FIFO"),
}
HUGE = {"a huge file": (fill, r"has 1,099,511,627,776 bytes, too many for a \.json file")}

# Files of a model's directory, an EAGLE-3 head's and an adapter's. Most of them are optional.
NAMES = (
    "config.json", "generation_config.json", "model.safetensors", "more.safetensors", INDEX,
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "merges.txt",
    "chat_template.jinja", MODULES, PROMPTS, PICKLED,
)  # fmt: skip
# What reads a file, by its name.
READERS: dict[str, Callable[[Path], object]] = {
    "config.json": ModelConfig.from_dir,
    "config.json of a head": HeadConfig.from_dir,
    "model.safetensors": weight_files,
    "part/model.safetensors": weight_files,
    INDEX: weight_files,
    PICKLED: lambda path: [*read_head(path)],
    "pooling/config.json": lambda path: read_conventions(path, 64),
    CONFIG_FILE: read_config,
    "adapter_model.safetensors": lambda path: _open(path / "adapter_model.safetensors").__enter__(),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Files that name other files, in folders."""
    (tmp_path / "part").mkdir()
    (tmp_path / "pooling").mkdir()
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "pooling"}]
    (tmp_path / MODULES).write_text(json.dumps(modules))
    return tmp_path


@pytest.mark.parametrize("what", [*ODD, *HUGE])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_may_have_only_ordinary_files(tmp_path: Path, name: str, what: str) -> None:
    """A link to nothing is not a missing file: the model would be another one without it."""
    if what in HUGE and not name.endswith(".json"):
        return  # weights may have any size
    make, says = (ODD | HUGE)[what]
    make(tmp_path / name)
    for find in (
        lambda: resolve_model(str(tmp_path), HEAD_PATTERNS),
        lambda: find_directory("tokenizer", str(tmp_path), HEAD_PATTERNS),
    ):
        with pytest.raises(OSError, match=says) as caught:
            find()
        assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("what", [*ODD, *HUGE])
@pytest.mark.parametrize("reader", READERS)
def test_readers_name_what_is_no_ordinary_file(directory: Path, reader: str, what: str) -> None:
    """A FIFO must not be opened: that waits for a writer."""
    name = reader.partition(" ")[0]
    make, says = (ODD | HUGE)[what]
    if what in HUGE and not name.endswith(".json"):
        return  # weights may have any size
    if "link" in what and name in (INDEX, PICKLED):
        return  # optional: finding the directory has refused them
    if name.startswith("part/"):
        (directory / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    make(directory / name)
    with pytest.raises(OSError, match=says) as caught:
        READERS[reader](directory)
    assert str(directory / name) in str(caught.value)


@pytest.mark.parametrize("what", ODD)
def test_weights_that_cannot_be_read_are_not_looked_at_for_a_head(
    tmp_path: Path, what: str
) -> None:
    """The error comes when weights are loaded."""
    ODD[what][0](tmp_path / "model.safetensors")
    assert not lacks_head(tmp_path)


def test_a_damaged_link_in_an_adapter_is_named(tmp_path: Path) -> None:
    dangle(tmp_path / "adapter_model.safetensors")
    with pytest.raises(OSError, match=r"adapter_model\.safetensors is a link to .* not exist"):
        number_of(tmp_path)


@pytest.mark.parametrize("make", [dangle, os.mkfifo])
def test_a_model_directory_that_is_something_else_is_named(
    tmp_path: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not asked for at the hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    make(tmp_path / "org" / "model")
    with pytest.raises(NotADirectoryError, match=r"must be a directory, .* 'org/model' is no"):
        resolve_model("org/model")


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/model.safetensors", "a/../../b", ".."])
def test_an_index_names_files_of_its_own_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(OSError, match=f"lists {name!r}, which is outside of its directory"):
        weight_files(tmp_path)


@pytest.mark.parametrize("value", [1, None, ["model.safetensors"], {}, True, ""])
def test_an_index_names_files_by_strings(tmp_path: Path, value: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": value}}))
    with pytest.raises(OSError, match="weight_map must name a file for each tensor, got"):
        weight_files(tmp_path)
    assert not lacks_head(tmp_path)


def test_files_in_folders_and_links_to_other_places_are_read(tmp_path: Path) -> None:
    """The hub's cache has links to `../../blobs`."""
    path = tmp_path / "snapshots" / "model"
    (path / "part").mkdir(parents=True)
    (tmp_path / "blob").touch()
    (path / "part" / "model.safetensors").symlink_to("../../../blob")
    (path / "config.json").symlink_to("../../blob")
    (path / INDEX).write_text(json.dumps({"weight_map": {"x": "part/model.safetensors"}}))
    assert weight_files(path) == [path / "part" / "model.safetensors"]
    assert resolve_model(str(path)) == path


@pytest.mark.parametrize("text", ["[" * 100_000, "\ufeff{}", '"\\ud800', "1" * 5000])
def test_json_that_python_cannot_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(OSError, match=r"config\.json is not valid JSON .*; copy or download it"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("folder", ["/etc", "../other", 5, ["a"]])
def test_a_module_of_a_vectors_model_is_in_its_directory(tmp_path: Path, folder: object) -> None:
    modules = [{"type": "sentence_transformers.models.Pooling", "path": folder}]
    (tmp_path / MODULES).write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=r"modules\.json: path must be .* got"):
        read_conventions(tmp_path, 64)
