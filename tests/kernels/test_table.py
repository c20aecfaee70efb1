"""The table of kernels: every name in it exists, and a function replaces its first call."""

import inspect
from importlib import import_module

import pytest
import torch
from changed_kernels import changed

from nanovllm.kernels.cpu.table import CPU_PLACES, IN_ONE_ORDER
from nanovllm.kernels.table import PLAIN, PLAIN_PLACES, Kernels
from nanovllm.kernels.triton.table import ORDERED_PLACES, TRITON_PLACES


@pytest.mark.parametrize(
    "places",
    [PLAIN_PLACES, CPU_PLACES | IN_ONE_ORDER, CPU_PLACES, TRITON_PLACES, ORDERED_PLACES],
    ids=["plain", "cpu in one order", "cpu", "triton", "triton in one order"],
)
def test_every_operation_is_where_the_table_says(places: dict[str, str]) -> None:
    if places in (TRITON_PLACES, ORDERED_PLACES):
        pytest.importorskip("triton")
    for operation, place in places.items():
        module, _, name = place.partition(":")
        found = getattr(import_module(f"nanovllm.kernels.{module}"), name or operation)
        twin = PLAIN_PLACES.get(operation)
        if twin is None or operation == "arrange":
            continue
        module, _, name = twin.partition(":")
        twin_function = getattr(import_module(f"nanovllm.kernels.{module}"), name or operation)
        expected = list(inspect.signature(twin_function).parameters)
        parameters = list(inspect.signature(found).parameters)
        assert parameters == expected[: len(parameters)], operation


def test_the_first_call_replaces_itself_by_the_function() -> None:
    from nanovllm.kernels.plain.silu_and_mul import silu_and_mul

    kernels = Kernels("two", PLAIN_PLACES)
    assert kernels.silu_and_mul is not silu_and_mul
    x = torch.randn(2, 6)
    assert torch.equal(kernels.silu_and_mul(x), silu_and_mul(x))
    assert kernels.silu_and_mul is silu_and_mul


def test_a_replaced_operation_leaves_the_other_set_as_it_is() -> None:
    other = changed(PLAIN, mask=len, graph_safe=True)
    assert other.mask is len and other.graph_safe and not PLAIN.graph_safe
    assert PLAIN.mask is not len and other.name == PLAIN.name
    assert other.few_rows([], torch.float32) is None
