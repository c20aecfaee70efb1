"""`logprobs_mode`: log-probabilities or logits, raw or after the parameters of the request."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import make_llm

from nanovllm import BeamSearchParams, SamplingParams
from nanovllm.outputs import TokenLogprob

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB = 259
BIAS = {70: 3.0, 71: -2.0}
COMMON: dict[str, Any] = dict(max_tokens=3, logprobs=VOCAB, prompt_logprobs=VOCAB, ignore_eos=True)
ASKED = [
    SamplingParams(temperature=0.7, top_k=5, logit_bias=BIAS, seed=1, **COMMON),
    SamplingParams(temperature=0.0, allowed_token_ids=[70, 80, 90], **COMMON),
    SamplingParams(temperature=2.0, seed=3, **COMMON),
    SamplingParams(temperature=1.0, seed=4, structured_outputs={"choice": ["abc"]}, **COMMON),
    SamplingParams(temperature=0.0, **COMMON),
]
PROMPTS = [[number + 1, *range(20), *range(9)] for number in range(len(ASKED))]
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


def by_place(entry: dict[int, TokenLogprob]) -> list[float]:
    """The values of all tokens, in the order of their ids."""
    known = dict(entry)  # which takes every number for an id, without a warning
    return [known[token_id].logprob for token_id in range(VOCAB)]


def reported(model_dir: Path, mode: str, **options: Any) -> tuple[list[list[int]], Any, Any]:
    """Tokens, and values by token id of generated tokens [requests, tokens, V] and of prompts."""
    with make_llm(model_dir, logprobs_mode=mode, **options) as llm:
        outputs = llm.generate(PROMPTS, ASKED, use_tqdm=False)
        if mode != "raw_logprobs":
            with pytest.raises(ValueError, match="beam_search needs logprobs_mode='raw_logprobs'"):
                llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=2))
    values, prompts = [], []
    for output in outputs:
        assert output.logprobs is not None and output.prompt_logprobs is not None
        values.append([by_place(entry) for entry in output.logprobs])
        prompts.append([by_place(entry) for entry in output.prompt_logprobs if entry is not None])
        for entry, token_id in zip(output.logprobs, output.token_ids, strict=True):
            own = dict(entry)[token_id]
            better = [one for one in entry.values() if one.logprob > own.logprob]
            assert own.rank == 1 + len(better)
    return [output.token_ids for output in outputs], torch.tensor(values), torch.tensor(prompts)


@pytest.mark.parametrize(
    "options", [{"scheduling": "mixed", "overlap": True}, {"speculative_config": NGRAM}], ids=str
)
def test_modes(model_dir: Path, options: dict[str, Any]) -> None:
    """The modes agree with each other by their definitions, and choose the same tokens."""
    found = {
        mode: reported(model_dir, mode, **options)
        for mode in ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
    }
    tokens = [ids for ids, _, _ in found.values()]
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]
    raw = found["raw_logits"][1]
    close: Any = dict(atol=1e-4, rtol=1e-4)
    assert raw[2].exp().sum(-1).sub(1).abs().min() > 1e-3, "logits, not log-probabilities"
    torch.testing.assert_close(found["raw_logprobs"][1], raw.log_softmax(-1), **close)
    processed = found["processed_logits"][1]
    torch.testing.assert_close(found["processed_logprobs"][1], processed.log_softmax(-1), **close)
    expected = raw.clone()
    for token_id, bias in BIAS.items():
        expected[0, :, token_id] += bias
    least = expected[0].topk(5).values[:, -1:]
    expected[0] = expected[0].masked_fill(expected[0] < least, -math.inf) / 0.7
    allowed = torch.tensor(ASKED[1].allowed_token_ids)
    expected[1] = torch.full_like(raw[1], -math.inf).index_copy(1, allowed, raw[1][:, allowed])
    expected[2] = raw[2] / 2
    for chosen in (0, 1, 2, 4):
        torch.testing.assert_close(processed[chosen], expected[chosen], **close)
    only = torch.isfinite(processed[3])
    assert only.sum(-1).tolist() == [1, 1, 1] and tokens[0][3] == only.long().argmax(-1).tolist()
    for mode, (_, _, prompts) in found.items():
        wanted = found["raw_logits"][2]
        wanted = wanted if mode.endswith("logits") else wanted.log_softmax(-1)
        torch.testing.assert_close(prompts, wanted, **close)


def test_callables_have_no_processed_logprobs(model_dir: Path) -> None:
    def same(_: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits

    params = SamplingParams(logprobs=1, logits_processors=[same])
    with (
        make_llm(model_dir, logprobs_mode="processed_logits") as llm,
        pytest.raises(ValueError, match="logprobs must be None with logits_processors"),
    ):
        llm.generate([1], params)
