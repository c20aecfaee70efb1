"""Answers on a CPU do not depend on what else is computed, also in bfloat16."""

import random
from pathlib import Path
from typing import Any

import pytest
from conftest import PRODUCTS, make_model

from nanovllm import LLM, SamplingParams

pytestmark = [pytest.mark.usefixtures("compiler"), pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logprobs_are_the_same_alone_and_among_others(
    dtype: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a product's order of sums depends on the number of rows of a step."""
    PRODUCTS["tiled"].use(monkeypatch)
    sizes = dict(hidden_size=96, intermediate_size=160, num_hidden_layers=2)
    make_model(tmp_path, tie_word_embeddings=tied, **sizes)
    chosen = random.Random(0)
    prompts = [[chosen.randrange(3, 90) for _ in range(chosen.randrange(3, 40))] for _ in range(36)]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)

    def answers(llm: LLM, prompts: list[list[int]]) -> list[list[Any]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [
            [(token, entry.logprob) for one in output.outputs[0].logprobs or ()
             for token, entry in one.items()]
            for output in outputs
        ]  # fmt: skip

    with LLM(
        tmp_path, device="cpu", dtype=dtype, attention_backend="cpu", cpu_kvcache_gib=0.02,
        max_model_len=64, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        together = answers(llm, prompts)
        assert answers(llm, prompts[:17]) == together[:17]
        for index in range(0, len(prompts), 4):
            assert answers(llm, prompts[index : index + 1]) == together[index : index + 1]
