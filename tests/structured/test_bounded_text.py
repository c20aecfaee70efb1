"""A constraint after free text of at most so many tokens."""

from pathlib import Path
from typing import Any

import pytest
from reference import make_llm

from nanovllm import SamplingParams
from nanovllm.structured_outputs import StructuredOutputs

pytestmark = pytest.mark.usefixtures("one_thread")
END = "</think>"
KINDS: tuple[dict[str, Any], ...] = ({}, {"choice": ["yes", "no"]}, {"regex": "[ab]{9}"})


def params(budget: int, **fields: Any) -> SamplingParams:
    asked = StructuredOutputs(after=END, after_tokens=budget, **fields)
    return SamplingParams(temperature=0, max_tokens=40, structured_outputs=asked)


def test_the_marker_is_forced_after_the_budget(model_dir: Path) -> None:
    """Also with drafts, whose rows have other budgets, and for preempted sequences."""
    asked = [params(budget, **fields) for budget in (0, 3, 9) for fields in KINDS]
    found = []
    options: tuple[dict[str, Any], ...] = (
        {},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {"num_kvcache_blocks": 12, "kvcache_block_size": 8, "max_model_len": 64},
    )
    for more in options:
        with make_llm(model_dir, **more) as llm:
            outputs = llm.generate(["abcabc"] * len(asked), asked, use_tqdm=False)
        found.append([output.token_ids for output in outputs])
        for one, output in zip(asked, outputs, strict=True):
            wanted = one.structured_outputs
            assert isinstance(wanted, StructuredOutputs) and wanted.after_tokens is not None
            text = llm.tokenizer.decode(output.token_ids[wanted.after_tokens :])
            assert text.startswith(END), "the free text has as many tokens as it may"
            if wanted.choice:
                assert text.removeprefix(END) in wanted.choice
    assert found[0] == found[1] == found[2]


def test_text_that_ends_by_itself_is_not_cut(model_dir: Path) -> None:
    """The budget counts up to the marker that the model writes."""
    marker = StructuredOutputs(after="a", after_tokens=30)
    bias = SamplingParams(temperature=0, max_tokens=40, structured_outputs=marker)
    with make_llm(model_dir) as llm:
        token_id = llm.tokenizer.encode("a")[0]
        forced = SamplingParams(
            temperature=0, max_tokens=40, structured_outputs=marker, logit_bias={token_id: 100}
        )
        (output,) = llm.generate(["x"], forced, use_tqdm=False)
        assert output.token_ids == [token_id] * 40
        (plain,) = llm.generate(["x"], bias, use_tqdm=False)
        assert plain.token_ids[30:31] == [token_id] or token_id in plain.token_ids[:30]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(after_tokens=5), "after_tokens needs after"),
        (dict(after=END), "just one of"),
        (dict(after=END, after_tokens=-1), "after_tokens must be >= 0"),
        (dict(after=END, after_tokens=1, regex="a", choice=["b"]), "got regex and choice"),
    ],
)
def test_bad_bounds(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StructuredOutputs(**fields)
