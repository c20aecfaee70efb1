"""Arrays that are uploaded while the device is busy arrive whole and in order."""

import numpy as np
import pytest
import torch

from nanovllm.engine.step.transfer import download, upload, upload_ahead


def test_the_cpu_shares_memory() -> None:
    array = np.arange(10)
    tensors = [upload(array, torch.device("cpu")), *upload_ahead(torch.device("cpu"), array)]
    tensors.append(download(tensors[0]))
    array[3] = 77
    assert all(tensor[3] == 77 for tensor in tensors)


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
