"""Memory at fixed addresses, with a driver that fails; on a GPU `test_weights_cuda`."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from nanovllm.weights import virtual_memory
from nanovllm.weights.virtual_memory import CHUNK, VirtualMemory

START = 1 << 40


class Driver:
    """Maps memory as CUDA does. `fails` are functions of which the next calls fail, or do not."""

    def __init__(self) -> None:
        self.fails: dict[str, list[bool]] = {}
        self.handles: set[int] = set()
        self.mapped: dict[int, int] = {}  # the handle by the address
        self.readable: set[int] = set()
        self._last = 0

    @property
    def allocated(self) -> int:
        """Chunks that have memory: by a handle, or by a mapping."""
        return len(self.handles | {*self.mapped.values()})

    def call(self, name: str, *arguments: Any) -> None:
        if (left := self.fails.get(name)) and left.pop(0):
            raise RuntimeError(f"{name} fails")
        values = [getattr(argument, "value", argument) for argument in arguments]
        if name == "cuMemAddressReserve":
            arguments[0]._obj.value = START
        elif name == "cuMemCreate":
            self._last += 1
            arguments[0]._obj.value = self._last
            self.handles.add(self._last)
        elif name == "cuMemMap":
            assert values[0] not in self.mapped and values[3] in self.handles
            self.mapped[values[0]] = values[3]
        elif name == "cuMemSetAccess":
            assert values[0] in self.mapped
            self.readable.add(values[0])
        elif name == "cuMemUnmap":
            del self.mapped[values[0]]
            self.readable.discard(values[0])
        else:
            assert name == "cuMemRelease"
            self.handles.remove(values[0])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The driver that `virtual_memory` calls."""
    driver = Driver()
    monkeypatch.setattr(virtual_memory, "call", driver.call)
    monkeypatch.setattr(VirtualMemory, "_context", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return driver


@pytest.mark.parametrize("again", [VirtualMemory.map, VirtualMemory.unmap])
def test_after_an_unmap_that_failed_all_can_be_mapped_or_unmapped(
    again: Callable[[VirtualMemory], None], driver: Driver
) -> None:
    memory = VirtualMemory(3 * CHUNK, torch.device("cuda", 0))
    memory.map()
    driver.fails["cuMemUnmap"] = [False, True]
    with pytest.raises(RuntimeError, match="cuMemUnmap fails"):
        memory.unmap()
    assert memory.mapped == 2 * CHUNK and driver.allocated == 2
    again(memory)
    assert memory.mapped == len(driver.mapped) * CHUNK == driver.allocated * CHUNK
    memory.unmap()
    assert memory.mapped == driver.allocated == 0


@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_chunk_that_cannot_be_mapped_takes_no_memory(function: str, driver: Driver) -> None:
    memory = VirtualMemory(2 * CHUNK, torch.device("cuda", 0))
    memory.map(1)
    driver.fails[function] = [True]
    with pytest.raises(RuntimeError, match=f"{function} fails"):
        memory.map()
    assert memory.mapped == CHUNK and driver.allocated == 1
    memory.map()
    assert {*driver.mapped} == driver.readable == {START, START + CHUNK}
    assert driver.allocated == 2
