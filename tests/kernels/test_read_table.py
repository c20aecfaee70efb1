"""Reading the device table: the kernels against their twin, to the last bit."""

from collections.abc import Callable

import pytest
import torch
from conftest import kernel_settings
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanovllm.kernels.plain.read_table import Decoding, TableState
from nanovllm.kernels.table import PLAIN, cpu_kernels

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_ROWS = 50
SHAPES = dict(
    num_rows=st.integers(1, 40),
    max_blocks=st.sampled_from([1, 3, 64, 640]),
    narrower=st.integers(0, 1),
    block_size=st.sampled_from([1, 16, 48, 256]),
    seed=st.integers(0, 2**31),
)


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
    )
    return TableState(*(x.to(device) for x in state))


@pytest.mark.slow
@kernel_settings(100)
@given(**SHAPES)
@example(num_rows=1, max_blocks=1, narrower=0, block_size=1, seed=0)
@example(num_rows=40, max_blocks=2500, narrower=1, block_size=16, seed=1)
def test_the_triton_kernel_equals_its_twin(
    kernel_device: str, num_rows: int, max_blocks: int, narrower: int, block_size: int, seed: int
) -> None:
    from nanovllm.kernels.triton.read_table import read_table

    shape = num_rows, max_blocks, narrower, block_size, seed
    assert_reads_as_its_twin(read_table, kernel_device, *shape)


@pytest.mark.usefixtures("compiler")
@settings(deadline=None)  # the first one compiles
@given(**SHAPES)
def test_the_cpu_kernel_equals_its_twin(
    num_rows: int, max_blocks: int, narrower: int, block_size: int, seed: int
) -> None:
    read_table = cpu_kernels().read_table
    shape = num_rows, max_blocks, narrower, block_size, seed
    assert_reads_as_its_twin(read_table, "cpu", *shape)


def assert_reads_as_its_twin(
    read_table: Callable[[TableState, int, int, int], Decoding],
    device: str, num_rows: int, max_blocks: int, narrower: int, block_size: int, seed: int,
) -> None:  # fmt: skip
    state, twin = (random_state(max_blocks, block_size, seed, device) for _ in range(2))
    width = max_blocks
    if narrower and max_blocks > 1:  # as wide as the longest needs
        width -= 1
        for rows in (state, twin):
            rows.lengths.clamp_(max=width * block_size - 1)
    found = read_table(state, num_rows, width, block_size)
    expected = PLAIN.read_table(twin, num_rows, width, block_size)
    for name, a, b in zip(found._fields, found, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        if name != "block_tables":
            assert torch.equal(a, b), name
    blocks = (expected.context_lens + block_size - 1) // block_size
    used = torch.arange(width, device=device) < blocks[:, None]
    assert torch.equal(found.block_tables, expected.block_tables.where(used, 0))
    for name, a, b in zip(state._fields, state, twin, strict=True):
        assert torch.equal(a, b), f"{name} of the table"


def test_lengths_grow_by_one_each() -> None:
    state = random_state(8, 16, 0, "cpu")
    before, batch = state.lengths.tolist(), state.batch[:30].tolist()
    state.lengths[:2] = 3
    before[:2] = [3, 3]
    PLAIN.read_table(state, 30, 8, 16)
    after = [n + (row in batch and n >= 0) for row, n in enumerate(before)]
    assert state.lengths.tolist() == after
    assert after[-1] == -1 and NUM_ROWS - 1 in batch, "the length of an unused row changed"
