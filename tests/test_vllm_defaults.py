"""Defaults of vLLM that scripts give: they are kept, or refused with what to use."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, AsyncLLM, EngineArgs, SamplingParams
from nanovllm.config import Config
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.engine.start.load import choose_formats
from nanovllm.models.config import ModelConfig
from nanovllm.structured_outputs import StructuredOutputs
from nanovllm.utils.checks import check_choice

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS: dict[str, Any] = dict(device="cpu", cpu_kvcache_gib=0.01, max_model_len=64)
GREEDY = SamplingParams(temperature=0, max_tokens=8)
HI = [{"role": "user", "content": "7+8="}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """As a script for vLLM makes one that writes out what it would get anyway."""
    with LLM(
        model=EMBEDDED_MODEL, load_format="safetensors", scheduling_policy="fcfs",
        swap_space=4, max_logprobs=100, limit_mm_per_prompt={"image": 0},
        language_model_only=False, disable_log_stats=True, enforce_eager=False, **OPTIONS,
    ) as llm:  # type: ignore[call-arg]  # fmt: skip
        yield llm


def test_priorities_are_refused_in_order_of_arrival(llm: LLM) -> None:
    """With `fcfs` they would decide nothing, or the policy would be ignored."""
    for priority in (1, -1):
        params = SamplingParams(max_tokens=2, priority=priority)
        with pytest.raises(ValueError, match=f"priority must be 0 with.*'fcfs', got {priority}"):
            llm.generate("1+1=", params, use_tqdm=False)
    with pytest.raises(ValueError, match=r"prompts\[1\]: priority must be 0"):
        llm.generate(["1", "2"], GREEDY, priority=[0, 1], use_tqdm=False)
    (output,) = llm.generate("1+1=", GREEDY, priority=[0], use_tqdm=False)
    assert output.text == "2" and llm.is_finished()


def test_keywords_of_chat_that_change_nothing_are_taken(llm: LLM) -> None:
    given: Any = dict(
        chat_template_content_format="auto", mm_processor_kwargs=None, tokenization_kwargs={}
    )
    (output,) = llm.chat(HI, GREEDY, use_tqdm=False, **given)
    assert output.text == "15"
    with pytest.raises(ValueError, match=r"^chat_template_content_format='openai': the template"):
        llm.chat(HI, GREEDY, use_tqdm=False, chat_template_content_format="openai")


def test_fields_of_prompts_that_change_nothing_are_taken(llm: LLM) -> None:
    prompt: Any = {"prompt": "7+8=", "multi_modal_data": None, "mm_processor_kwargs": {}}
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.text == "15"
    with pytest.raises(ValueError, match=r"^prompts\[0\]: .*multi_modal_data.*: models are text"):
        llm.generate({**prompt, "multi_modal_data": {"image": 1}}, GREEDY, use_tqdm=False)


def test_a_gguf_file_has_no_safetensors(tmp_path: Path) -> None:
    model = ModelConfig.from_dir(Path(EMBEDDED_MODEL))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match=r"^load_format must be 'auto' for a GGUF file, got 'safe"):
        choose_formats(Config("m", load_format="safetensors"), model, tmp_path)
    (tmp_path / "model.safetensors").touch()
    choose_formats(Config("m", load_format="safetensors"), model, tmp_path)


@pytest.mark.parametrize("kind", [LLM, AsyncLLM, EngineArgs])
def test_a_missing_model_is_named(kind: Any) -> None:
    with pytest.raises(TypeError, match=f"^{kind.__name__} needs a model: a path or a hub id"):
        kind(max_model_len=64)


def test_errors_use_pythons_words() -> None:
    with pytest.raises(ValueError, match=r"^kind must be 'a', got None$"):
        check_choice("kind", None, ["a"])
    with pytest.raises(ValueError, match=r"choice must be .*, got \[\]$"):
        StructuredOutputs(choice=[])
