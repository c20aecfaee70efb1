"""Device tables of tests: copies of them, and whether they are equal."""

import torch

from nanovllm.kernels.plain.read_table import DraftState, TableState


def on_device(state: TableState, device: str) -> TableState:
    """A copy on a device."""
    *columns, drafts = (*state[:-1], DraftState(*(x.clone().to(device) for x in state.drafts)))
    return TableState(*(x.clone().to(device) for x in columns), drafts)


def assert_equal_tables(state: TableState, twin: TableState) -> None:
    for name, a, b in zip(
        (*TableState._fields[:-1], *DraftState._fields),
        (*state[:-1], *state.drafts), (*twin[:-1], *twin.drafts), strict=True,
    ):  # fmt: skip
        assert torch.equal(a, b), f"{name} of the table"
