"""Where models and tokenizers come from: directories, the home directory, the hub."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.command.main import main
from nanovllm.command.parser import make_parser
from nanovllm.engine.requests.tokenizer import load_tokenizer
from nanovllm.models.checkpoint import (
    CONFIG_FILES,
    MODEL_PATTERNS,
    TOKENIZER_PATTERNS,
    resolve_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")

Calls = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def calls(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What the hub is asked for; it answers with the standard model."""
    asked: Calls = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.append((repo_id, options))
        return str(model_dir)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


@pytest.fixture
def home(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with the standard model in `models/x`."""
    shutil.copytree(model_dir, tmp_path / "models" / "x")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


# The hub


def test_a_model_is_downloaded_in_its_revision(calls: Calls, model_dir: Path) -> None:
    path = resolve_model("owner/model", revision="refs/pr/7", download_dir="/models")
    assert path == model_dir
    expected = dict(
        revision="refs/pr/7", cache_dir=Path("/models"), allow_patterns=list(MODEL_PATTERNS)
    )
    assert calls == [("owner/model", expected)]


def test_without_options_the_hub_has_its_defaults(calls: Calls) -> None:
    """The main branch, and the hub's own cache."""
    resolve_model("owner/model", CONFIG_FILES)
    expected = dict(revision=None, cache_dir=None, allow_patterns=list(CONFIG_FILES))
    assert calls == [("owner/model", expected)]


def test_a_tokenizer_is_downloaded_from_its_main_branch(calls: Calls, model_dir: Path) -> None:
    tokenizer = load_tokenizer("owner/x", model_dir, download_dir="~/models")
    assert tokenizer.eos_token == "<|eos|>"
    cache = Path("~/models").expanduser()
    expected = dict(revision=None, cache_dir=cache, allow_patterns=list(TOKENIZER_PATTERNS))
    assert calls == [("owner/x", expected)]


def test_a_models_own_tokenizer_is_not_downloaded_again(calls: Calls, model_dir: Path) -> None:
    """Its directory is the download already, in the revision of the model."""
    assert load_tokenizer(None, model_dir, download_dir="/models") is not None
    assert calls == []


def test_a_revision_of_a_local_directory_is_refused(calls: Calls, model_dir: Path) -> None:
    """A directory has no revisions: the model would be another than the one asked for."""
    with pytest.raises(ValueError, match="revision='v1'") as caught:
        resolve_model(str(model_dir), revision="v1")
    assert f"model {str(model_dir)!r} is a local directory" in str(caught.value)
    assert resolve_model(str(model_dir), download_dir="/models") == model_dir
    assert calls == []


def test_a_failed_download_names_what_was_asked_for(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(*args: Any, **options: Any) -> str:
        raise RuntimeError("no such branch")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(OSError, match=r"model 'owner/x'.*revision 'v9'.*no such branch"):
        resolve_model("owner/x", revision="v9")
    with pytest.raises(OSError, match=r"tokenizer 'owner/x'.*no such branch"):
        load_tokenizer("owner/x", model_dir)


# The home directory


def test_a_model_and_its_tokenizer_are_found_in_the_home_directory(home: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (home / "models" / "x" / name).rename(home / name)
    with LLM("~/models/x", tokenizer="~", device="cpu", num_kvcache_blocks=8) as llm:
        (output,) = llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
        assert llm.tokenizer.eos_token == "<|eos|>"
        assert llm.config.model == "~/models/x", "the name that the user gave"
    assert len(output["token_ids"]) <= 2


@pytest.mark.parametrize(
    "command",
    [
        ["info", "~/models/x", "--json"],
        ["info", "--model", "~/models/x", "--json"],
        ["generate", "a", "--model", "~/models/x", "--tokenizer", "~/models/x", "--json",
         "--max-tokens", "2", "--num-kvcache-blocks", "8"],
    ],
)  # fmt: skip
def test_the_command_finds_a_model_in_the_home_directory(
    home: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """Quoted, or after `=`, so that no shell expands it."""
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)


def test_the_command_finds_files_in_the_home_directory(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "prompt").write_text("12+34=")
    assert main(["generate", "--file=~/prompt", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "46\n"
    (home / "in").write_text('{"prompt": "12+34="}')
    assert main(["run-batch", "~/in", "--output=~/out"]) == 0
    assert (home / "out").exists()
    args = make_parser().parse_args(["bench", "--json=~/a", "--profile=~/b"])
    assert (args.json, args.profile) == (home / "a", home / "b")


@pytest.mark.parametrize("source", ["~/models/none", "~no-such-user/x"])
def test_a_tokenizer_that_cannot_be_found_is_named(home: Path, source: str) -> None:
    with pytest.raises(OSError, match="tokenizer directory") as caught:
        load_tokenizer(source, home)
    assert repr(source) in str(caught.value)


def test_a_tokenizers_file_instead_of_its_directory_is_named(model_dir: Path) -> None:
    file = str(model_dir / "tokenizer.json")
    with pytest.raises(OSError, match="tokenizer must be a directory") as caught:
        load_tokenizer(file, model_dir)
    assert repr(file) in str(caught.value)
