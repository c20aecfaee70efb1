"""Drafts in the device table: how they are guessed and accepted, and the kernels' twins."""

import pytest
import torch
from conftest import kernel_settings
from hypothesis import given
from hypothesis import strategies as st
from tables import assert_equal_tables, on_device

from nanovllm import SamplingParams
from nanovllm.drafting.ngram_proposer import NgramText
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.kernels.plain.read_table import (
    CHANCE_BITS,
    NO_DRAFT,
    Decoding,
    DraftState,
    TableState,
)
from nanovllm.kernels.table import PLAIN

MOST = 5
BLOCK_SIZE, LONGEST = 16, 3000


def make_state(texts: list[list[int]], num_recent: list[int]) -> TableState:
    """Rows with these tokens, of which the last ones are recent; then unused ones."""
    num_rows = len(texts) + 2

    def words(*shape: int) -> torch.Tensor:
        return torch.zeros(num_rows, *shape, dtype=torch.int32)

    state = TableState(
        tokens=torch.zeros(num_rows, dtype=torch.long),
        seeds=torch.arange(num_rows) * 77,
        lengths=words() - 1,
        temperatures=torch.ones(num_rows),
        batch=torch.arange(num_rows, dtype=torch.int32).flip(0),
        block_tables=torch.arange(num_rows * 200, dtype=torch.int32).view(num_rows, 200),
        drafts=DraftState(
            words(MOST) + NO_DRAFT, words() + LONGEST, words(), words(1 + MOST), words(LONGEST),
            torch.zeros(1, dtype=torch.int32),
        ),
    )  # fmt: skip
    drafts = state.drafts
    for row, (text, count) in enumerate(zip(texts, num_recent, strict=True)):
        count = max(1, min(count, len(text)))
        tokens = torch.tensor(text, dtype=torch.int32)
        state.lengths[row], drafts.counts[row] = len(text) - 1, count
        drafts.history[row, : len(text) - count] = tokens[: len(text) - count]
        drafts.recent[row, :count] = tokens[-count:]
        state.tokens[row] = text[-1]
    return state


TEXTS = st.lists(
    st.tuples(
        st.integers(2, 4).flatmap(lambda k: st.lists(st.integers(0, k), min_size=1, max_size=60)),
        st.sampled_from([0, 0, 1030, 2500]),  # of one token more, in front
        st.integers(1, 1 + MOST),
    ),
    min_size=1, max_size=4,
)  # fmt: skip


@pytest.mark.parametrize("bounds", [(1, 4), (2, 3), (3, 3), (1, 1)])
@given(texts=TEXTS)
def test_the_table_guesses_what_the_text_of_a_sequence_does(
    bounds: tuple[int, int], texts: list[tuple[list[int], int, int]]
) -> None:
    rows = [[5] * front + text for text, front, _ in texts]
    state = make_state(rows, [count for *_, count in texts])
    PLAIN.guess_ngrams(state, len(state.batch), 4, *bounds)
    for row, tokens in enumerate(rows):
        expected = NgramText(*bounds).propose(Sequence(tokens, SamplingParams(max_tokens=100)), 4)
        assert state.drafts.tokens[row, :4].tolist() == (expected or [NO_DRAFT] * 4)
        assert state.drafts.history[row, : len(tokens)].tolist() == tokens


def test_with_a_chance_each_row_has_drafts() -> None:
    state = make_state([[1, 2, 3], [4, 4]], [2, 1])
    state.drafts.chance.fill_(1)
    PLAIN.guess_ngrams(state, 4, 3, 1, 2)
    assert state.drafts.tokens[:2, :3].tolist() == [[3, 3, 3], [4, 4, 4]]
    assert state.drafts.history[0, :3].tolist() == [1, 2, 3]


@kernel_settings(40)
@given(texts=TEXTS, bounds=st.sampled_from([(1, 4), (3, 3)]), data=st.data())
def test_the_kernel_guesses_as_its_twin(
    kernel_device: str,
    texts: list[tuple[list[int], int, int]],
    bounds: tuple[int, int],
    data: st.DataObject,
) -> None:
    from nanovllm.kernels.triton.step.guess_ngrams import guess_ngrams

    rows = [[5] * front + text for text, front, _ in texts]
    twin = make_state(rows, [count for *_, count in texts])
    twin.drafts.chance.fill_(data.draw(st.integers(0, 1)))
    state = on_device(twin, kernel_device)
    guess_ngrams(state, len(rows) + 1, 3, *bounds)
    PLAIN.guess_ngrams(twin, len(rows) + 1, 3, *bounds)
    assert_equal_tables(on_device(state, "cpu"), twin)


def read(state: TableState, num_queries: int) -> Decoding:
    return PLAIN.read_table(state, len(state.batch), 200, BLOCK_SIZE, num_queries)


def test_tokens_count_up_to_the_first_wrong_draft() -> None:
    """They are added to their rows; to accept others of the same step replaces them."""
    state = make_state([[1, 2, 3], [4] * 10, [6, 7]], [1, 1, 1])
    state.drafts.tokens[0, :3] = torch.tensor([5, 6, 7])
    state.drafts.tokens[1, :3] = torch.tensor([5, 6, NO_DRAFT])
    state.drafts.limits[2] = 1  # its first query has no place
    decoding = read(state, 4)
    drawn = torch.tensor([[0] * 4, [0] * 4, [5] * 4, [5, 6, 9, 9], [5, 9, 7, 8]])
    for tokens, first in ((drawn, 2), (drawn.where(drawn != 9, 6), 4)):
        outcome = PLAIN.accept(state, decoding, tokens.flatten(), 4)
        assert outcome[:, 2:].tolist() == tokens.tolist()
        assert outcome[:, :2].tolist() == [[0, 0], [0, 0], [0, 0], [3, 2], [first, 3]]
    assert state.lengths.tolist()[:3] == [6, 12, 1]
    assert state.tokens.tolist()[:3] == [8, 6, 7]
    assert state.drafts.counts.tolist()[:3] == [4, 3, 1]
    assert state.drafts.recent[:2, :3].tolist() == [[5, 6, 7], [5, 6, 6]]


@pytest.mark.parametrize("chance", [0.3, 0.8, 1.0])
def test_drafts_are_accepted_by_chance(chance: float) -> None:
    """A draft takes the place of the token that was drawn. Off by five standard
    errors at most, which one run in two million exceeds; the keys are fixed."""
    state = make_state([[1, 2]] * 400, [1] * 400)
    state.drafts.chance.fill_(int(chance * 2**CHANCE_BITS))
    state.drafts.tokens.fill_(3)
    decoding = read(state, 1 + MOST)
    outcome = PLAIN.accept(state, decoding, torch.full((402 * 6,), 9), 1 + MOST)[2:]
    accepted = outcome[:, 0] - 1
    tries = (accepted + (accepted < MOST)).sum()
    assert abs(accepted.sum() / tries - chance) < 5 * (0.25 / tries) ** 0.5
    for (count, number, *tokens), length in zip(
        outcome.tolist(), state.lengths.flip(0)[2:].tolist(), strict=True
    ):
        assert number == MOST and length == 1 + count
        assert tokens[: count - 1] == [3] * (count - 1)


@kernel_settings(40)
@given(
    seed=st.integers(0, 999), num_queries=st.integers(2, 1 + MOST),
    accepted=st.sampled_from([0, 0, 1 << (CHANCE_BITS - 1)]),
)  # fmt: skip
def test_the_kernel_accepts_as_its_twin(
    kernel_device: str, seed: int, num_queries: int, accepted: int
) -> None:
    from nanovllm.kernels.triton.step.accept import accept

    torch.manual_seed(seed)
    num_rows = 9
    twin = make_state([[1] * n for n in torch.randint(1, 90, (num_rows,)).tolist()], [1] * num_rows)
    twin.drafts.tokens[:] = torch.randint(NO_DRAFT, 2, twin.drafts.tokens.shape)
    twin.drafts.limits[:] = twin.lengths + torch.randint(0, 2 + MOST, twin.lengths.shape)
    twin.drafts.chance.fill_(accepted)
    decoding = read(twin, num_queries)
    drawn = torch.randint(0, 2, (10 * num_queries,))
    state = on_device(twin, kernel_device)
    on = Decoding(*(x.to(kernel_device) for x in decoding))
    outcome = accept(state, on, drawn.to(kernel_device), num_queries)
    assert torch.equal(outcome.cpu(), PLAIN.accept(twin, decoding, drawn, num_queries))
    assert_equal_tables(on_device(state, "cpu"), twin)
