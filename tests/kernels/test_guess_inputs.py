"""The inputs of guesses, of heads and of draft models, and the kernel's twin."""

import torch
from conftest import kernel_settings
from hypothesis import given
from hypothesis import strategies as st
from tables import assert_equal_tables, on_device

from nanovllm.kernels.plain.guess_inputs import GuessInputs, Kept
from nanovllm.kernels.plain.noise import noise_keys
from nanovllm.kernels.plain.read_table import DraftState, TableState
from nanovllm.kernels.table import PLAIN

MOST, BLOCK_SIZE, MAX_BLOCKS = 4, 4, 9


def make_state(lengths: list[int]) -> TableState:
    """Rows of these lengths in a random order, with random tokens."""
    num_rows = len(lengths)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(0, 999, (num_rows, *shape), dtype=torch.int32)

    drafts = DraftState(words(MOST), words(), words(), words(1 + MOST), words(), words())
    drafts.limits.remainder_(BLOCK_SIZE * MAX_BLOCKS)
    return TableState(
        tokens=words().long(), seeds=words().long(),
        lengths=torch.tensor(lengths, dtype=torch.int32), temperatures=torch.rand(num_rows),
        batch=torch.randperm(num_rows).int(), block_tables=words(MAX_BLOCKS), drafts=drafts,
    )  # fmt: skip


def make_kept(lengths: list[int], num_new: list[int], num_kept: list[int]) -> Kept:
    first = torch.tensor(lengths, dtype=torch.int32) - torch.tensor(num_new, dtype=torch.int32)
    counts = torch.tensor(num_kept, dtype=torch.int32)
    return Kept(first, counts, torch.zeros(len(lengths), 1 + MOST, 8))


def test_new_positions_are_read_with_the_tokens_after_them() -> None:
    """Three new ones, one, one of a row that was prefilled, none, more than queries; unused."""
    state = make_state([10, 7, 5, 6, 20, -1])
    kept = make_kept([10, 7, 5, 6, 20, -1], [3, 1, 1, 2, 5, 0], [5, 5, 1, 1, 5, 1])
    state.batch[:], state.drafts.limits[:] = torch.arange(6), 30
    recent, tokens = state.drafts.recent.tolist(), state.tokens.tolist()
    inputs = PLAIN.guess_inputs(state, kept, 6, 4, BLOCK_SIZE)
    lens = inputs.context_lens.view(6, 4).tolist()
    assert lens == [[8, 9, 10, 0], [7] + [0] * 3, [5] + [0] * 3, [0] * 4, [17, 18, 19, 20], [0] * 4]
    ids = inputs.next_ids.view(6, 4).tolist()
    assert ids[0][:3] == [*recent[0][:2], tokens[0]]
    assert [ids[1][0], ids[2][0]] == tokens[1:3]
    assert ids[4] == [*recent[4][1:4], tokens[4]]
    assert inputs.sources.view(6, 4)[0].tolist()[:3] == [0, 1, 2]
    assert inputs.sources.view(6, 4)[4].tolist() == [21, 22, 23, 24]
    assert inputs.last.tolist() == [2, 4, 8, 12, 19, 20]
    assert (inputs.slots >= 0).tolist() == (inputs.context_lens > 0).tolist()
    block = state.block_tables[0, 2] * BLOCK_SIZE
    assert inputs.slots[1:3].tolist() == [block, block + 1]
    assert kept.first.tolist() == state.lengths.tolist() and kept.counts.tolist() == [4] * 6


def test_later_drafts_end_at_the_rows_limit() -> None:
    """Draft i is guessed at the position before it, with the key of its own."""
    state = make_state([10, 10, -1])
    state.batch[:] = torch.arange(3)
    state.drafts.limits[:] = torch.tensor([30, 11, 30])
    inputs = PLAIN.guess_inputs(state, make_kept([10, 10, -1], [1] * 3, [1] * 3), 3, 5, BLOCK_SIZE)
    assert inputs.later_lens[1:].T.tolist() == [[11, 12, 13], [11, 0, 0], [0, 0, 0]]
    assert inputs.later_positions[1:, 0].tolist() == [10, 11, 12]
    expected = noise_keys(state.seeds[0], torch.arange(11, 15))
    assert inputs.keys[:, 0].tolist() == expected.tolist()


def test_a_draft_model_reads_the_last_token_and_a_draft_before_it() -> None:
    """Rows with one new token, two, five; one at its limit, one before it; an unused one."""
    state = make_state([10, 7, 20, 9, 9, -1])
    state.batch[:] = torch.arange(6)
    state.drafts.counts[:] = torch.tensor([1, 2, 5, 2, 1, 3])
    state.drafts.limits[:] = torch.tensor([30, 30, 30, 9, 10, 30])
    recent, tokens = state.drafts.recent.tolist(), state.tokens.tolist()
    inputs = PLAIN.guess_inputs(state, None, 6, 4, BLOCK_SIZE)
    lens = inputs.context_lens.view(6, 2).tolist()
    assert lens == [[11, 0], [7, 8], [20, 21], [9, 0], [10, 0], [0, 0]]
    ids = inputs.next_ids.view(6, 2).tolist()
    assert ids[0][0] == tokens[0]
    assert ids[1] == [recent[1][0], tokens[1]] and ids[2] == [recent[2][3], tokens[2]]
    assert inputs.last.tolist() == [0, 3, 5, 7, 8, 10]
    assert (inputs.positions + 1).where(inputs.slots >= 0, 0).view(6, 2).tolist() == lens
    block = state.block_tables[1, 1] * BLOCK_SIZE
    assert inputs.slots[2:4].tolist() == [block + 2, block + 3]
    assert inputs.later_lens.T.tolist() == [
        [11, 12, 13], [8, 9, 10], [21, 22, 23], [0] * 3, [10, 0, 0], [0] * 3,
    ]  # fmt: skip
    assert inputs.keys[:, 1].tolist() == noise_keys(state.seeds[1], torch.arange(8, 11)).tolist()


@kernel_settings(40)
@given(
    seed=st.integers(0, 999), num_queries=st.integers(1, 1 + MOST),
    num_rows=st.integers(1, 7), is_model=st.booleans(),
)  # fmt: skip
def test_the_kernel_reads_as_its_twin(
    kernel_device: str, seed: int, num_queries: int, num_rows: int, is_model: bool
) -> None:
    from nanovllm.kernels.triton.step.guess_inputs import guess_inputs

    torch.manual_seed(seed)
    lengths = torch.randint(-1, BLOCK_SIZE * MAX_BLOCKS - MOST, (7,)).tolist()
    twin = make_state(lengths)
    num_new, num_kept = torch.randint(-1, 3 + MOST, (2, 7)).clamp(max=1 + MOST).tolist()
    num_new = [min(new, length) for new, length in zip(num_new, lengths, strict=True)]
    twin.drafts.counts[:] = torch.tensor(
        [max(1, min(new, length)) for new, length in zip(num_kept, lengths, strict=True)]
    )
    kept = make_kept(lengths, num_new, num_kept)
    state, on = on_device(twin, kernel_device), Kept(*(x.clone().to(kernel_device) for x in kept))
    num_queries += is_model and num_queries == 1
    got = guess_inputs(state, None if is_model else on, num_rows, num_queries, BLOCK_SIZE)
    expected = PLAIN.guess_inputs(
        twin, None if is_model else kept, num_rows, num_queries, BLOCK_SIZE
    )
    for name, a, b in zip(GuessInputs._fields, got, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a.cpu(), b), name
    assert torch.equal(on.first.cpu(), kept.first) and torch.equal(on.counts.cpu(), kept.counts)
    assert_equal_tables(on_device(state, "cpu"), twin)
