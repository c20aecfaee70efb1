"""Writing the device table: words that are still in the host's memory."""

import numpy as np
import pytest
import torch
from conftest import kernel_settings
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.engine.run.device_table import BUFFERS, FEW, DeviceTable, TableChanges, TableLayout


@kernel_settings(20)
@given(sizes=st.lists(st.sampled_from([1, 7, 256, 300, FEW, FEW + 1]), min_size=1, max_size=7))
def test_changes_are_as_copied(sizes: list[int], kernel_device: str) -> None:
    """Few and many in turns, and more writes than there are buffers."""
    from nanovllm.kernels.triton.step.write_table import write_table

    rng, layout = np.random.default_rng(len(sizes)), TableLayout(63, 60, 16, 4, 100)
    device = torch.device(kernel_device)
    written = DeviceTable(layout, device, write_table)
    copied = DeviceTable(layout, torch.device("cpu"))
    for size in [*sizes] * (1 + BUFFERS // 2):
        changes = TableChanges(
            rng.choice(layout.size, size, replace=False),
            rng.integers(-(2**31), 2**31 - 1, size, dtype=np.int32),
        )
        written.write(changes)
        copied.write(changes)
        if device.type == "cuda":
            torch.cuda.synchronize()  # as engines wait for all steps but the last two
    assert torch.equal(copied._words, written._words.cpu())


@pytest.mark.cuda
def test_buffers_are_enough_for_the_steps_in_flight() -> None:
    """The device is busy while the host writes the changes of the next steps."""
    from nanovllm.kernels.triton.step.write_table import write_table

    layout = TableLayout(63, 60, 16)
    table = DeviceTable(layout, torch.device("cuda"), write_table)
    table.write(TableChanges(np.array([0]), np.array([0])))  # compiles
    torch.cuda._sleep(50_000_000)
    for number in range(BUFFERS):
        table.write(TableChanges(np.arange(100 * number, 100 * number + 100), np.full(100, number)))
    words = table._words.cpu()
    for number in range(BUFFERS):
        assert (words[100 * number : 100 * number + 100] == number).all()
