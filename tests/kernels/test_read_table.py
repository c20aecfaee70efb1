"""Reading the device table: the kernels against their twin, to the last bit."""

from collections.abc import Callable

import pytest
import torch
from conftest import kernel_settings
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tables import assert_equal_tables, on_device

from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.plain.read_table import NO_DRAFT, Decoding, DraftState, TableState
from nanovllm.kernels.table import PLAIN

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_ROWS = 50
SHAPES = dict(
    num_rows=st.integers(1, 40),
    max_blocks=st.sampled_from([1, 3, 64, 640]),
    narrower=st.integers(0, 1),
    block_size=st.sampled_from([1, 16, 48, 256]),
    num_queries=st.sampled_from([1, 1, 2, 5]),
    seed=st.integers(0, 2**31),
)
DRAFTS = 4  # of each row, at most


def random_state(max_blocks: int, block_size: int, seed: int, device: str) -> TableState:
    """Rows of all lengths, a fifth of them unused, and a batch of used rows and the last one."""
    torch.manual_seed(seed)
    lengths = torch.randint(0, max_blocks * block_size, (NUM_ROWS,), dtype=torch.int32)
    lengths[:2] = torch.tensor([0, max_blocks * block_size - 1])
    lengths[40:] = -1
    batch = torch.randperm(40, dtype=torch.int32)
    batch[torch.rand(40) < 0.2] = NUM_ROWS - 1
    state = TableState(
        tokens=torch.randint(-1, 151_936, (NUM_ROWS,)),
        seeds=torch.randint(-(2**63), 2**63 - 1, (NUM_ROWS,)),
        lengths=lengths,
        temperatures=torch.rand(NUM_ROWS),
        batch=batch,
        block_tables=torch.randint(2**31, (NUM_ROWS, max_blocks), dtype=torch.int32),
        drafts=DraftState(
            tokens=torch.randint(0, 151_936, (NUM_ROWS, DRAFTS), dtype=torch.int32),
            limits=torch.randint(0, max_blocks * block_size + 1, (NUM_ROWS,), dtype=torch.int32),
            counts=torch.zeros(NUM_ROWS, dtype=torch.int32),
            recent=torch.zeros(NUM_ROWS, 1 + DRAFTS, dtype=torch.int32),
            history=torch.zeros(NUM_ROWS, 0, dtype=torch.int32),
            chance=torch.zeros(1, dtype=torch.int32),
        ),
    )
    room = max_blocks * block_size - 1 - lengths[:, None]
    number = torch.minimum(torch.randint(0, DRAFTS + 1, (NUM_ROWS, 1)), room)
    state.drafts.tokens[torch.arange(DRAFTS) >= number] = NO_DRAFT
    return on_device(state, device)


@pytest.mark.slow
@kernel_settings(100)
@given(**SHAPES)
@example(num_rows=1, max_blocks=1, narrower=0, block_size=1, num_queries=1, seed=0)
@example(num_rows=40, max_blocks=2500, narrower=1, block_size=16, num_queries=5, seed=1)
def test_the_triton_kernel_equals_its_twin(
    kernel_device: str, num_rows: int, max_blocks: int, narrower: int, block_size: int,
    num_queries: int, seed: int,
) -> None:  # fmt: skip
    from nanovllm.kernels.triton.step.read_table import read_table

    shape = num_rows, max_blocks, narrower, block_size, num_queries, seed
    assert_reads_as_its_twin(read_table, kernel_device, *shape)


@pytest.mark.usefixtures("compiler")
@settings(deadline=None)  # the first one compiles
@given(**SHAPES)
def test_the_cpu_kernel_equals_its_twin(
    num_rows: int, max_blocks: int, narrower: int, block_size: int, num_queries: int, seed: int
) -> None:
    read_table = cpu_kernels().read_table
    shape = num_rows, max_blocks, narrower, block_size, num_queries, seed
    assert_reads_as_its_twin(read_table, "cpu", *shape)


def assert_reads_as_its_twin(
    read_table: Callable[[TableState, int, int, int, int], Decoding],
    device: str, num_rows: int, max_blocks: int, narrower: int, block_size: int,
    num_queries: int, seed: int,
) -> None:  # fmt: skip
    state, twin = (random_state(max_blocks, block_size, seed, device) for _ in range(2))
    width = max_blocks
    if narrower and max_blocks > 1:  # as wide as the longest needs
        width -= 1
        for rows in (state, twin):
            rows.lengths.clamp_(max=width * block_size - num_queries)
    found = read_table(state, num_rows, width, block_size, num_queries)
    expected = PLAIN.read_table(twin, num_rows, width, block_size, num_queries)
    for name, a, b in zip(found._fields, found, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        if name != "block_tables":
            assert torch.equal(a, b), name
    lens = expected.context_lens.view(num_rows, num_queries).amax(1)
    blocks = (lens + block_size - 1) // block_size
    used = torch.arange(width, device=device) < blocks[:, None]
    assert torch.equal(found.block_tables.where(used, 0), expected.block_tables.where(used, 0))
    assert_equal_tables(state, twin)


def test_lengths_grow_by_one_each() -> None:
    state = random_state(8, 16, 0, "cpu")
    before, batch = state.lengths.tolist(), state.batch[:30].tolist()
    state.lengths[:2] = 3
    before[:2] = [3, 3]
    PLAIN.read_table(state, 30, 8, 16)
    after = [n + (row in batch and n >= 0) for row, n in enumerate(before)]
    assert state.lengths.tolist() == after
    assert after[-1] == -1 and NUM_ROWS - 1 in batch, "the length of an unused row changed"


def test_drafts_are_further_queries_of_their_row() -> None:
    """They come after the last token, read the same blocks, and leave the row as it is."""
    state = random_state(8, 16, 0, "cpu")
    state.batch[:3] = torch.tensor([5, NUM_ROWS - 1, 7])
    state.lengths[torch.tensor([5, 7])] = torch.tensor([14, 20], dtype=torch.int32)
    state.drafts.tokens[5] = torch.tensor([100, 101, 102, 103])
    state.drafts.tokens[7] = torch.tensor([200, NO_DRAFT, NO_DRAFT, NO_DRAFT])
    state.drafts.limits.fill_(200)
    tokens, lengths = state.tokens.clone(), state.lengths.clone()
    found = PLAIN.read_table(state, 3, 8, 16, num_queries=4)
    first, second = int(tokens[5]), int(tokens[7])
    assert found.input_ids.tolist() == [first, 100, 101, 102, 0, 0, 0, 0, second, 200, 0, 0]
    assert found.context_lens.tolist() == [15, 16, 17, 18, 0, 0, 0, 0, 21, 22, 0, 0]
    assert found.positions.tolist()[:4] == [14, 15, 16, 17]
    one, two = state.block_tables[5, :2].tolist()
    slots = [one * 16 + 14, one * 16 + 15, two * 16, two * 16 + 1]
    assert found.slot_mapping.tolist()[:8] == [*slots, -1, -1, -1, -1]
    assert found.rows.tolist() == [NUM_ROWS - 1] * 12
    assert torch.equal(state.lengths, lengths) and torch.equal(state.tokens, tokens)
    plain = [PLAIN.read_table(state, 3, 8, 16) for _ in range(2)]  # a token a step instead
    assert [int(x.keys[0]) for x in plain] == found.keys[:2].tolist()


def test_no_query_is_behind_its_rows_limit() -> None:
    """There it has no block, or its token would be one too many; a row may have to wait."""
    state = random_state(8, 16, 0, "cpu")
    state.batch[:2] = torch.tensor([5, 7])
    state.lengths[torch.tensor([5, 7])] = torch.tensor([14, 20], dtype=torch.int32)
    state.drafts.tokens.fill_(9)
    state.drafts.limits[torch.tensor([5, 7])] = torch.tensor([16, 20], dtype=torch.int32)
    found = PLAIN.read_table(state, 2, 8, 16, num_queries=3)
    assert found.context_lens.tolist() == [15, 16, 0, 0, 0, 0]
