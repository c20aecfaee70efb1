"""Callables on logits get the tokens in lists that no step copies, and that they cannot change."""

import copy
import pickle
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.engine.requests.fixed_ids import FixedIds
from nanovllm.engine.requests.processors import Processors
from nanovllm.engine.schedule.parts import SequenceParts
from nanovllm.engine.schedule.sequence import Sequence

LOGITS = torch.zeros(8)


def make(call: Callable[..., Any], prompt: list[int], first: Sequence | None = None) -> Sequence:
    parts = SequenceParts(processors=Processors([call, call]))
    return Sequence(prompt, SamplingParams(max_tokens=None), parts=parts, first=first)


def test_a_step_copies_neither_prompt_nor_output() -> None:
    """It allocates little; and what a callable gets are the tokens of the sequence."""
    seen: list[Any] = []

    def call(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen[:] = [prompt, output]
        return logits

    seqs = [make(call, [7] * 100_000)]
    seqs.append(make(call, [7] * 100_000, seqs[0]))
    for seq in seqs:
        seq.token_ids += [5] * 100_000
        seq.parts.processors.apply(seq, [], LOGITS)
        prompt = seen[0]
    tracemalloc.start()
    try:
        for seq in seqs:
            seq.token_ids.append(6)
            seq.parts.processors.apply(seq, [1, 2], LOGITS)
            assert seen[0] is prompt, "samples share it"
            assert seen[1] == [*[5] * 100_000, 6, 1, 2]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for seq in seqs:
            seq.token_ids.append(3)
            seq.parts.processors.apply(seq, [1], LOGITS)
        assert tracemalloc.get_traced_memory()[1] - before < 50_000, "a list takes 0.8 MB"
    finally:
        tracemalloc.stop()
    assert seen[1] == [*[5] * 100_000, 6, 3, 1]


def test_a_token_that_is_replaced_is_replaced_in_the_list() -> None:
    seen: list[list[int]] = []

    def call(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append([*output])
        return logits

    seq = make(call, [9])
    for tokens, drafts in (
        ([], []),
        ([1, 2], [3, 4]),
        ([1, 5], []),
        ([1], [7]),
        ([4], []),
        ([], []),
    ):
        seq.token_ids[1:] = tokens
        seq.parts.processors.apply(seq, drafts, LOGITS)
        assert seen[-2:] == [tokens + drafts] * 2
    seq.token_ids[1:] = [2, 3]
    seq.parts.processors.apply(seq, [], LOGITS)
    seq.parts.processors.reset()
    seq.token_ids[1:] = [4, 3]
    seq.parts.processors.apply(seq, [], LOGITS)
    assert seen[-1] == [4, 3]


CHANGES: list[Callable[[Any], Any]] = [
    lambda ids: ids.append(1), lambda ids: ids.extend([1]), lambda ids: ids.insert(0, 1),
    lambda ids: ids.pop(), lambda ids: ids.remove(5), lambda ids: ids.clear(),
    lambda ids: ids.sort(), lambda ids: ids.reverse(), lambda ids: ids.__setitem__(0, 1),
    lambda ids: ids.__delitem__(0), lambda ids: ids.__iadd__([1]), lambda ids: ids.__imul__(2),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_callable_cannot_change_the_list(change: Callable[[Any], Any]) -> None:
    ids = FixedIds([5, 6])
    with pytest.raises(TypeError, match=r"change a copy, list\(token_ids\)"):
        change(ids)
    assert ids == [5, 6]


def test_copies_are_plain_lists() -> None:
    ids = FixedIds([5, 6])
    copies = (
        ids[:], ids.copy(), ids.__add__([]), [].__add__(ids), copy.copy(ids), copy.deepcopy(ids),
        pickle.loads(pickle.dumps(ids)),
    )  # fmt: skip
    assert [type(one) for one in copies] == [list] * 7 and all(one == [5, 6] for one in copies)
