"""Which rows of a step the last layer computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model

from nanovllm import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("two_threads")

PROMPT = list(range(3, 53))
# For a prompt of 50 tokens, computed 16 at a time, and two more tokens: the number of rows of the
# last layer's feed-forward part, in each step that has any. With prompt_logprobs each row of the
# prompt is needed, for the token that follows it.
SEEN = {
    "tokens alone": ({}, [1, 1]),
    "prompt_logprobs": (dict(prompt_logprobs=0), [16, 16, 16, 1 + 1, 1]),
    "two samples": (dict(n=2, temperature=1.0), [1, 2]),
    "both": (dict(n=9, temperature=1.0, prompt_logprobs=0), [16, 16, 16, 1 + 1, 9]),
}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize("case", SEEN)
def test_the_last_layer_computes_only_the_rows_that_are_needed(
    family: str, case: str, device: str, tmp_path: Path
) -> None:
    params, expected = SEEN[case]
    seen: list[list[int]] = []
    options: dict[str, Any] = dict(max_num_batched_tokens=16, num_kvcache_blocks=20)
    path = make_model(tmp_path, family=family)
    with LLM(path, device=device, overlap=False, enforce_eager=True, **options) as llm:
        layers = llm.model_runner.shard.model.model.layers
        for layer in (layers[0], layers[-1]):
            rows: list[int] = []
            seen.append(rows)

            def note(_: torch.nn.Module, args: Any, rows: list[int] = rows) -> None:
                rows.append(len(args[0]))

            layer.mlp.register_forward_pre_hook(note)
        llm.generate([PROMPT], SamplingParams(**{"temperature": 0, "max_tokens": 2} | params))
    first, last = seen
    assert first == [16, 16, 16, 2, expected[-1]] and last == expected
