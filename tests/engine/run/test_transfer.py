"""Arrays that are uploaded while the device is busy arrive whole and in order."""

import dataclasses

import numpy as np
import pytest
import torch

from nanovllm.engine.run.filters.biases import Biases
from nanovllm.engine.run.filters.listed import AllowedIds
from nanovllm.engine.run.filters.penalties import Penalties
from nanovllm.engine.run.reports import Columns
from nanovllm.engine.run.transfer import download, upload, upload_ahead
from nanovllm.engine.run.upload_stream import with_tensors
from nanovllm.kernels.operands.cuts import Cuts
from nanovllm.layers.filters import Filters


def test_the_cpu_shares_memory() -> None:
    array = np.arange(10)
    tensors = [upload(array, torch.device("cpu")), *upload_ahead(torch.device("cpu"), array)]
    tensors.append(download(tensors[0]))
    array[3] = 77
    assert all(tensor[3] == 77 for tensor in tensors)


def test_every_tensor_of_a_value_is_changed() -> None:
    """In dataclasses, tuples, named tuples and lists; what is not a tensor stays."""
    x = torch.zeros(1)
    pair = (x, x)
    cuts = Cuts(x, x, x, num_candidates=3)
    filters = Filters(x, x, (AllowedIds(x, pair), Biases(pair, x), Penalties(x, x, x, x, x)), cuts)
    moved, columns = with_tensors([filters, Columns(x, x, x)], lambda tensor: tensor.to("meta"))
    assert isinstance(moved, Filters) and isinstance(columns, Columns)
    assert moved.cuts is not None and moved.cuts.num_candidates == 3

    def tensors(value: object) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        if dataclasses.is_dataclass(value):
            value = [getattr(value, field.name) for field in dataclasses.fields(value)]
        parts = value if isinstance(value, tuple | list) else []
        return [tensor for part in parts for tensor in tensors(part)]

    found = tensors([moved, columns])
    assert len(found) == 1 + 1 + 3 + 3 + 5 + 3 + 3
    assert all(tensor.is_meta for tensor in found)
    assert not any(tensor.is_meta for tensor in tensors(filters)), "the host's stay"


@pytest.mark.cuda
def test_uploads_keep_their_order_and_their_memory() -> None:
    """All are copied while the device still sleeps; freed memory is used again."""
    device = torch.device("cuda")
    sums = []
    torch.cuda._sleep(200_000_000)
    for number in range(300):
        one, other = upload_ahead(device, np.full(4096 + number, number), np.full(7, number))
        sums.append((one.sum() + other.sum()).unsqueeze(0))
        del one, other
        torch.cuda._sleep(100_000)
    found = download(torch.cat(sums))
    torch.cuda.synchronize()
    assert found.tolist() == [(4096 + number + 7) * number for number in range(300)]
