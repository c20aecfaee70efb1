"""The time of a sum of few rows over two GPUs: by NCCL, by NCCL and the norm, and by our kernels.

    python benchmarks/exchange_gpus.py [--shapes 1x4096,256x4096]

Two processes, each with a GPU, replay a CUDA graph of 20 sums. Reports medians in microseconds, of
bfloat16, after it has compared the kernels' sums with those of one process.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from nanovllm.engine.ranks.nccl_ranks import NcclRanks
from nanovllm.kernels.triton.linear.rms_norm import add_rms_norm
from nanovllm.kernels.triton.ranks.all_reduce import PeerKernels

SHAPES = "1x4096,32x4096,128x4096,256x4096,512x4096,1x1024,32x1024,256x1024"
SUMS, REPLAYS, EPS = 20, 20, 1e-6


def numbers(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """The same normal numbers on every GPU."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).bfloat16()


def microseconds(ranks: NcclRanks, call: Callable[[], Any]) -> float:
    """The median time of a call, from graphs that hold many."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(SUMS):
                call()
        times = []
        for _ in range(REPLAYS):
            ranks.minimum(1)  # both begin at the same time
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / SUMS)
    return statistics.median(times[REPLAYS // 4 :])


def compare(ranks: NcclRanks, kernels: PeerKernels, shape: tuple[int, int]) -> str:
    """Check one shape, and time it: a line of the report."""
    device = kernels.places.device
    parts = [numbers(shape, seed, device) for seed in range(2)]
    x, residual, weight = (
        parts[ranks.rank],
        numbers(shape, 2, device),
        numbers(shape[1:], 3, device),
    )
    total = (parts[0].float() + parts[1].float() + residual.float()).bfloat16()
    norm, _ = add_rms_norm(total, torch.zeros_like(total), weight, EPS)
    assert torch.equal(kernels.add_rms_norm(x, residual, weight, EPS)[0], norm), "a wrong norm"
    peer, ranks.peer_kernels = ranks.peer_kernels, None  # so that NCCL sums
    try:
        times = [
            microseconds(ranks, lambda: ranks.all_reduce(x)),
            microseconds(ranks, lambda: add_rms_norm(ranks.all_reduce(x), residual, weight, EPS)),
            microseconds(ranks, lambda: kernels.add_rms_norm(x, residual, weight, EPS)),
        ]
    finally:
        ranks.peer_kernels = peer
    columns = " | ".join(f"{each:.1f}" for each in times)
    return f"| {shape[0]} x {shape[1]} | {columns} |"


def main() -> None:
    """Start the second process, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--address", type=int, help="for the second process")
    args = parser.parse_args()
    rank = int(args.address is not None)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    ranks = NcclRanks(rank, 2, device, args.address)
    if rank == 0:
        command = [sys.executable, __file__, "--shapes", args.shapes]
        subprocess.Popen([*command, "--address", str(ranks.address)])
        print("| rows x size | NCCL | NCCL, then residual and norm | ours |\n|---|---|---|---|")
    ranks.connect()
    ranks.connect_peers(PeerKernels)
    if ranks.peer_kernels is None:
        raise SystemExit("the kernels between GPUs do not work here")
    for shape in args.shapes.split(","):
        rows, size = map(int, shape.split("x"))
        line = compare(ranks, ranks.peer_kernels, (rows, size))
        if rank == 0:
            print(line, flush=True)
    ranks.leave(together=True)


if __name__ == "__main__":
    main()
