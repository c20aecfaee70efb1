"""The Triton store against its twin: interpreted on the CPU, compiled for three targets, and run.

Triton reads TRITON_INTERPRET when it is imported, so this file runs itself in a process of its own,
once for all interpreted cases: `python test_store_kvcache.py` prints a line of JSON for each.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.kernels.paged_attention import store_kvcache_torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# tokens, heads, head_dim
SHAPES = [(1, 1, 64), (1, 8, 128), (5, 1, 128), (7, 3, 80), (4, 7, 96), (3, 2, 256), (33, 2, 64)]


def make_inputs(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu", strided: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key, value, caches full of other numbers, and slots of which about a third are -1."""
    tokens, heads, head_dim = shape
    torch.manual_seed(tokens * heads + head_dim)
    if strided:  # views into one tensor: neither tokens nor heads of a view adjoin
        fused = torch.randn(tokens, 3 * heads + 2, 2 * head_dim).to(dtype).to(device)
        key, value = fused[:, 1 : heads + 1, :head_dim], fused[:, heads::2, head_dim:][:, :heads]
    else:
        key, value = (torch.randn(shape).to(dtype).to(device) for _ in range(2))
    block_size = 4
    blocks = tokens // block_size + 3
    k_cache, v_cache = (
        torch.randn(blocks, block_size, heads, head_dim).to(dtype).to(device) for _ in range(2)
    )
    slots = torch.randperm(blocks * block_size)[:tokens]
    if tokens > 1:
        slots[torch.randperm(tokens)[: tokens // 3 + 1]] = -1
        slots[0] = blocks * block_size - 1 if blocks * block_size - 1 not in slots else slots[0]
    return key, value, k_cache, v_cache, slots.to(device)


def differs_from_twin(store: Callable[..., None], *inputs: torch.Tensor) -> str:
    """What differs after both have stored; empty for nothing."""
    key, value, k_cache, v_cache, slots = inputs
    k_twin, v_twin = k_cache.clone(), v_cache.clone()
    before = [x.clone() for x in (key, value, slots)]
    store(key, value, k_cache, v_cache, slots)
    store_kvcache_torch(key, value, k_twin, v_twin, slots)
    if not torch.equal(k_cache, k_twin):
        return "keys differ"
    if not torch.equal(v_cache, v_twin):
        return "values differ"
    if not all(map(torch.equal, before, (key, value, slots))):
        return "inputs were changed"
    return ""


CASES: dict[str, dict[str, Any]] = {
    f"{'x'.join(map(str, shape))} {dtype}{' strided' if strided else ''}": dict(
        shape=shape, dtype=DTYPES[dtype], strided=strided
    )
    for shape in SHAPES
    for dtype in DTYPES
    for strided in (False, True)
}

# One byte an element and nothing touched but the last pages: 2 GiB of addresses, not of memory.
BIG_HEADS, BIG_DIM = 2, 64
BIG_SLOTS = 2**31 // (BIG_HEADS * BIG_DIM) + 8


def store_far_away() -> str:
    """Write to the first slots whose offset 32 bits do not hold."""
    from nanovllm.kernels.store_kvcache import store_kvcache

    cache = torch.empty(BIG_SLOTS // 8, 8, BIG_HEADS, BIG_DIM, dtype=torch.uint8)
    assert cache.numel() > 2**31
    slots = torch.tensor([0, BIG_SLOTS - 1, -1, BIG_SLOTS - 9, BIG_SLOTS - 8, 3])
    key = torch.randint(1, 255, (len(slots), BIG_HEADS, BIG_DIM), dtype=torch.uint8)
    rows = cache.flatten(0, 1)
    around = [BIG_SLOTS - 10, BIG_SLOTS - 7, BIG_SLOTS - 2, 1, 2, 4]
    rows[around] = 0
    # Keys and values go to one cache, which need not exist twice.
    store_kvcache(key, key, cache, cache, slots)
    kept = slots >= 0
    if not torch.equal(rows[slots[kept]], key[kept]):
        return "the tokens are not in their slots"
    return "other slots were written" if rows[around].any() else ""


def run_interpreted() -> None:
    """Run every case under the interpreter; print a line for each."""
    from triton.runtime.interpreter import GridExecutor

    from nanovllm.kernels.store_kvcache import store_kvcache

    # The interpreter copies arguments back to the device; on the CPU they never left it, and the
    # copy would touch every page of a big cache.
    GridExecutor._restore_args_dev = lambda *args: None
    for name, case in CASES.items():
        report(name, differs_from_twin(store_kvcache, *make_inputs(**case)))
    report("far away", store_far_away())


def report(name: str, problem: str) -> None:
    sys.stdout.write(json.dumps({"name": name, "problem": problem}) + "\n")
    sys.stdout.flush()


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    """What differs, by case; a case that crashes the process leaves itself and the rest out."""
    pytest.importorskip("triton")
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), root]))
    done = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    results = {line["name"]: line["problem"] for line in lines}
    if done.returncode:
        results["stderr"] = f"exit {done.returncode}: {done.stderr[-2000:]}"
    return results


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_differs_from_its_twin(name: str, interpreted: dict[str, str]) -> None:
    assert interpreted.get(name, interpreted.get("stderr")) == ""


def test_slots_beyond_32_bits_wrap_around(interpreted: dict[str, str]) -> None:
    assert interpreted.get("far away", interpreted.get("stderr")) == ""


def test_a_cache_that_is_not_contiguous_is_written_all_the_same() -> None:
    pytest.importorskip("triton")
    from nanovllm.kernels.store_kvcache import store_kvcache

    key, value, k_cache, v_cache, slots = make_inputs((3, 2, 64), torch.float32)
    with pytest.raises(AssertionError):
        store_kvcache(key, value, k_cache.transpose(0, 1), v_cache, slots)
    with pytest.raises(AssertionError):
        store_kvcache(key.transpose(1, 2), value, k_cache, v_cache, slots)


# Compiled ahead of time: a GPU is not needed for that


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize(("dtype", "head_dim"), [("bf16", 128), ("fp32", 80)])
def test_compiled_kernel_computes_addresses_in_32_bits(
    capability: int, dtype: str, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from nanovllm.kernels.store_kvcache import _store_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = ["key_ptr", "value_ptr", "k_cache_ptr", "v_cache_ptr"]
    ints = ["key_token_stride", "key_head_stride", "value_token_stride", "value_head_stride"]
    source = ASTSource(
        fn=_store_kernel,
        signature=dict.fromkeys(pointers, f"*{dtype}")
        | dict(slots_ptr="*i64")
        | dict.fromkeys([*ints, "num_heads"], "i32")
        | dict(HEAD_DIM="constexpr", BLOCK_D="constexpr"),
        constexprs=dict(HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim)),
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert len(kernel.asm["cubin"]) > 1000
    ir, ptx = kernel.asm["ttir"], kernel.asm["ptx"]
    assert f".target sm_{capability}" in ptx
    # slot * num_heads and (...) * HEAD_DIM are products of 64-bit numbers.
    slot = re.search(r"(%\w+) = tt\.load %\w+ (?:\S+ )?: !tt\.ptr<i64>", ir)
    assert slot, ir
    assert re.search(rf"arith\.muli {slot[1]}, %\w+ : i64", ir), ir
    assert re.search(r"\bm(ul|ad)\.lo\.[su]64\b", ptx), ptx
    # What is added to the cache's pointers has 64 bits; only `d`, under 256, may have 32.
    for pointer in ("k_cache_ptr", "v_cache_ptr"):
        added = re.search(rf"tt\.addptr %{pointer}\w*, %\w+ : !tt\.ptr<\w+>, (i\d+)", ir)
        splat = re.search(rf"(%\w+) = tt\.splat %{pointer}\b", ir)
        if splat:
            added = re.search(rf"tt\.addptr {splat[1]}, %\w+ : \S+, tensor<\d+x(i\d+)>", ir)
        assert added and added[1] == "i64", ir


# On the device


@pytest.mark.cuda
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 8, 128)])
def test_kernel_on_the_device_differs_from_its_twin(
    shape: tuple[int, int, int], dtype: torch.dtype, strided: bool
) -> None:
    from nanovllm.kernels.store_kvcache import store_kvcache

    inputs = make_inputs(shape, dtype, "cuda", strided)
    assert differs_from_twin(store_kvcache, *inputs) == ""


@pytest.mark.cuda
def test_slots_beyond_32_bits_wrap_around_on_the_device() -> None:
    from nanovllm.kernels.store_kvcache import store_kvcache

    num_slots, heads, head_dim = 2**31 // (8 * 128) + 16, 8, 128
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("the device has less than 6 GiB to spare")
    cache = torch.zeros(num_slots // 16, 16, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([num_slots - 1, 0, -1, num_slots - 17], device="cuda")
    key = torch.randn(4, heads, head_dim, device="cuda").bfloat16()
    store_kvcache(key, key, cache, cache, slots)
    kept = slots >= 0
    rows = cache.flatten(0, 1)
    assert torch.equal(rows[slots[kept]], key[kept])
    assert int(rows.any(-1).any(-1).sum()) == 3


if __name__ == "__main__":
    run_interpreted()
