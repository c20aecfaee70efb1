"""Long texts that a grammar forces: the same tokens as llguidance's, by the start of the text."""

from typing import Any

import numpy as np
import pytest

from nanovllm import StructuredOutputs
from nanovllm.structured.long_text import LONG, PART, may_be_long
from nanovllm.structured.masks import Masks
from tests.grammar_words import constrain, sequence_of, words_grammars

GRAMMARS = words_grammars()
TEXT = "abc12 ab é日本 null {bc" * 260
LONG_TEXTS: dict[str, dict[str, Any]] = {
    "choice": dict(choice=[TEXT, "z"]),
    "json": dict(json=dict(const=TEXT)),
    "lark": dict(grammar=f'start: /[az]/ "{TEXT}" /[bc]/'),
    "pattern": dict(regex="(abc ){1500}12"),
    "after a text": dict(choice=[TEXT], after="</think>"),
}


@pytest.mark.parametrize("kind", LONG_TEXTS)
def test_a_long_text_has_the_tokens_and_masks_of_llguidance(kind: str) -> None:
    """At its start, far inside, near its end, and after wrong drafts."""
    ours, theirs = (constrain(GRAMMARS, **LONG_TEXTS[kind]) for _ in range(2))
    assert ours.long is not None
    theirs.long = None
    seq = sequence_of([ord("x"), *b"</think>"] if ours.free is not None else [])
    num_long = number = 0
    while True:
        end = ours.update(seq)
        assert end == theirs.update(seq)
        if end is not None:
            break
        num_long += bool(ours.ahead())
        forced = ours.forced(seq, 16)
        assert forced == theirs.forced(seq, 16)
        if number % 16 == 0 or not forced:
            drafts = [forced[:length] for length in range(len(forced) + 1)] + [[ord("q")]]
            rows = [Masks([(one, some) for some in drafts]) for one in (ours, theirs)]
            assert rows[0].fill() == rows[1].fill()
            assert np.array_equal(rows[0].array, rows[1].array)
            bits = np.unpackbits(rows[0].array[0].view(np.uint8), bitorder="little")
        seq.token_ids += forced or [int(bits.argmax())]
        number += 1
    assert end.reason == "stop" and num_long > 10


def test_a_step_reads_only_the_start_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has 17 masks of a text of 20,000 letters; the whole text was read for each."""
    constraint = constrain(GRAMMARS, choice=["q" * 20_000])
    assert constraint.long is not None
    read: list[int] = []
    tokens_of = constraint.long._tokens_of

    def count(text: bytes) -> list[int]:
        read.append(len(text))
        return tokens_of(text)

    monkeypatch.setattr(constraint.long, "_tokens_of", count)
    seq = sequence_of([])
    for _ in range(3):
        drafts = constraint.forced(seq, 16)
        assert len(drafts) == 16
        masks = Masks([(constraint, drafts[:length]) for length in range(17)])
        masks._jobs = lambda _: ([], [])  # type: ignore[method-assign]
        assert masks.fill() == set()
        seq.token_ids += drafts
    assert len(read) == 3 and max(read) <= PART + 1


def test_grammars_of_usual_size_are_llguidance_s() -> None:
    for given in (
        dict(json=dict(type="object", properties=dict(a=dict(type="string", maxLength=9000)))),
        dict(regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
        dict(choice=["a", "b" * (LONG - 10)]),
        dict(json_object=True),
    ):
        assert not may_be_long(StructuredOutputs(**given))
    for given in (
        dict(json=dict(items=dict(const="abc"), minItems=3000)),
        dict(regex="((ab){100}){30}"),
        dict(regex="((ab){40}){40}c"),
        dict(grammar='start: t{5000}\nt: "a"'),
    ):
        assert may_be_long(StructuredOutputs(**given))
