"""Kernels compiled for three GPUs, without a GPU. `CASES` is the table.

It costs more than 20 seconds: a compilation takes about one. A run compiles a case of each kind for
one GPU, others with each commit, and with `--all` all of them.
"""

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ahead_of_time
import pytest
import selection
import torch
from ahead_of_time import CAPABILITIES, CASES, HOPPER, ORDERED_STATES

pytestmark = pytest.mark.slow

HOPPER_PREFILL = "_hopper_prefill_kernel"


class Compiled:
    """The kernels of cases, compiled when they are asked for by a process without the interpreter.

    Triton knows what it has compiled by the source: pytest's cache keeps it for the next run.
    """

    def __init__(self, folder: Path) -> None:
        root = str(Path(__file__).resolve().parents[2])
        env = os.environ | {
            "TRITON_CACHE_DIR": str(folder),
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root])),
        }
        env.pop("TRITON_INTERPRET", None)
        self._start = functools.partial(
            subprocess.Popen, [sys.executable, ahead_of_time.__file__, "--serve"],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.process = self._start()
        self._kernels: dict[tuple[str, int], list[dict[str, Any]]] = {}

    def __getitem__(self, case: tuple[str, int]) -> list[dict[str, Any]]:
        """The kernels of a case for a capability; fails the test where one does not compile."""
        if case not in self._kernels:
            assert self.process.stdin and self.process.stdout
            self.process.stdin.write(json.dumps(case) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
            if not answer:  # the compiler took the process with it
                self.process.communicate()
                self.process = self._start()
                answer = json.dumps([{"error": f"the process ended: {case}"}])
            self._kernels[case] = json.loads(answer)
        for kernel in self._kernels[case]:
            if "error" in kernel:
                pytest.fail(kernel["error"], pytrace=False)
        return self._kernels[case]


@pytest.fixture(scope="module")
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Compiled]:
    pytest.importorskip("triton")
    kept = getattr(request.config, "cache", None)  # none with -p no:cacheprovider
    compiled = Compiled(kept.mkdir("triton") if kept else tmp_path_factory.mktemp("triton"))
    yield compiled
    compiled.process.communicate()


def kind(pair: tuple[str, int]) -> tuple[Any, ...]:
    """What kernels of other cases have in common with those of a case, on any GPU."""
    name, _ = pair
    return name.partition(",")[0], "codes" in name


# A case of each kind for one of its GPUs, or all.
PAIRS = selection.one_of_each(
    [(n, c) for n, case in CASES.items() for c in case.capabilities], kind, "compiled kernels"
)


@pytest.mark.parametrize(("name", "capability"), PAIRS)
def test_every_kernel_compiles_fits_and_spills_little(
    name: str, capability: int, compiled: Compiled
) -> None:
    """A spilled register costs two trips to memory; too much shared memory fails at the launch."""
    for kernel in compiled[name, capability]:
        spilled, shared = kernel["spill_bytes"], kernel["shared_bytes"]
        assert shared <= CAPABILITIES[capability], f"{kernel['kernel']} asks for {shared} bytes"
        assert spilled <= CASES[name].max_spill, f"{kernel['kernel']} spills {spilled} bytes"


def caches_reached(ir: str) -> set[str]:
    """The pointers to which values read at `slots_ptr` or `tables_ptr` are added, in 64 bits.

    A pass over Triton's IR in its order: `base` has the argument that a pointer comes from, and
    `cached` the numbers that come from a slot or a block. None may be narrower when it grows,
    except counts of tokens: no cache has 2^31, and copied tiles are addressed in tokens.
    """
    base: dict[str, str] = {}
    cached: set[str] = set()
    tokens: set[str] = set()
    reached: set[str] = set()
    for line in ir.splitlines():
        parsed = re.match(r"\s*(%\w+) = ([\w.]+) (.*?) : (.*?)(?: loc\(.*)?$", line)
        if not parsed:
            continue
        name, op, operands, types = parsed.groups()
        first, *others = re.findall(r"%\w+", operands) or [""]
        wide = re.search(r"\bi64$|xi64>$", types)
        base[name] = base.get(first, first)
        cached.discard(name)
        tokens.discard(name)
        if op == "tt.load" and base[name] in ("%slots_ptr", "%tables_ptr"):
            cached.add(name)
        elif op == "tt.addptr" and others[0] in cached:
            assert wide, f"32 bits: {line}"
            reached.add(base[name].removeprefix("%"))
        elif op in ("arith.cmpi", "tt.addptr", "tt.load", "tt.descriptor_load"):
            continue
        elif cached.intersection((first, *others)):
            assert not wide or not tokens.intersection((first, *others)), f"32 bits before: {line}"
            cached.add(name)
            if not wide:
                tokens.add(name)
    return reached


# Block size 0 means no cache.
CACHED = (
    "store_kvcache", "norm_rope_store", "decode_attention", "prefill_attention", "latent_decode",
    "latent_prefill", "ordered_decode", "ordered_prefill", "ordered_latent",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        (name, capability)
        for name, capability in PAIRS
        if name.startswith(CACHED) and not name.endswith("block size 0")
    ],
)
def test_offsets_in_the_cache_have_64_bits(name: str, capability: int, compiled: Compiled) -> None:
    """In a cache above 2 GiB, a 32-bit offset is another token's, or outside of the cache."""
    # What plans the attention comes before it, and what merges its parts comes after it.
    *_, kernel = (k for k in compiled[name, capability] if k["kernel"] != "_merge_kernel")
    ir, ptx = (
        (Path(kernel["folder"]) / f"{kernel['kernel']}.{kind}").read_text()
        for kind in ("ttir", "ptx")
    )
    assert f".target sm_{capability}" in ptx
    reached = {"k_cache_ptr", "v_cache_ptr"} if "store" in name else {"k_ptr", "v_ptr"}
    if "latent" in name:
        reached = {"k_ptr"}
    if "codes" in name:
        reached = {"k_codes_ptr", "v_codes_ptr"} if name.startswith("prefill") else reached
        reached |= {"k_scales_ptr", "v_scales_ptr"}
    assert caches_reached(ir) == reached, ir


@pytest.mark.parametrize(
    ("name", "capability"),
    [(name, capability) for name, capability in PAIRS if name.startswith("all_reduce")],
)
def test_all_threads_read_a_count_before_one_writes_it(
    name: str, capability: int, compiled: Compiled
) -> None:
    """Else warps of a program disagree on the slot of an exchange, and it never ends."""
    found = 0
    for kernel in compiled[name, capability]:
        ptx = (Path(kernel["folder"]) / f"{kernel['kernel']}.ptx").read_text()
        for at, between in re.findall(
            r"ld\.global\.b32 \{[^}]*\}, \[ (%rd\d+) \+ 0 \];(.*?)st\.global\.b32 \[ \1 \+ 0 \]",
            ptx, re.DOTALL,
        ):  # fmt: skip
            found += 1
            assert "bar.sync" in between, f"{kernel['kernel']} writes the count at {at} too early"
    assert found == sum(
        kernel["kernel"] != "_sample_kernel" for kernel in compiled[name, capability]
    )


@pytest.mark.parametrize(
    "name", [f"sample_masked, race, {dtype}" for dtype in (torch.bfloat16, torch.float32)]
)
def test_a_masked_row_is_read_in_whole_vectors(name: str, compiled: Compiled) -> None:
    """Logits 16 bytes at a time, and words of the bitmap once for all tokens that a thread has."""
    (ptx,) = (
        (Path(kernel["folder"]) / "_sample_masked_kernel.ptx").read_text()
        for kernel in compiled[name, 90]
        if kernel.get("kernel") == "_sample_masked_kernel"
    )
    assert "ld.global.v4.b32" in ptx
    words = len(re.findall(r"ld\.global\.b32", ptx))
    assert words <= 6, "words, also where infinite logits are counted, and the temperature"


# What grows with the batch, by argument; offsets into the rest are bounded by the GPU's size.
GROWING = {
    "q_ptr", "k_ptr", "v_ptr", "out_ptr", "tables_ptr", "x_ptr", "residual_ptr", "sum_ptr",
    "qkv_ptr", "key_ptr", "value_ptr", "k_cache_ptr", "v_cache_ptr", "cos_ptr", "sin_ptr",
    "logits_ptr", "experts_ptr", "k_codes_ptr", "v_codes_ptr",
}  # fmt: skip


def narrow_accesses(ir: str) -> list[str]:
    """Loads and stores of memory that grows, at offsets computed in 32 bits."""
    root: dict[str, str] = {}
    wide: set[str] = set()
    narrow = []
    for line in ir.splitlines():
        access = re.match(r"\s*(?:%\w+ = )?tt\.(load|store) (%\w+)", line)
        if access and access[2] not in wide:
            pointer = root.get(access[2], access[2]).removeprefix("%")
            narrow += [line] if pointer in GROWING else []
        derived = re.match(r"\s*(%\w+) = tt\.(addptr|splat|broadcast|expand_dims) (%\w+)", line)
        if derived:
            name, op, base = derived.groups()
            root[name] = root.get(base, base)
            wide.discard(name)
            added_wide = op == "addptr" and re.search(r"\bi64|xi64\b", line.rpartition(" : ")[2])
            if base in wide or added_wide:
                wide.add(name)
    return narrow


# `few_rows` and `few_experts` take 256 rows at most, `few_mx_experts` fewer, `quantized_rows` 512,
# and `block_products` 2^30 numbers.
@pytest.mark.parametrize(
    "name",
    [
        n
        for n, c in PAIRS
        if c == HOPPER and not n.startswith(("few_", "quantized_rows", "block_products"))
    ],
)
def test_row_offsets_of_a_large_batch_have_64_bits(name: str, compiled: Compiled) -> None:
    """Row times stride exceeds 2^31: 8192 rows of 262,144 logits, or 87,000 of a wide layer."""
    for kernel in compiled[name, 90]:
        if kernel["kernel"] == "_first_best_kernel":  # a number for each row
            continue
        kind = "ttgir" if kernel["kernel"] == HOPPER_PREFILL else "ttir"  # Gluon begins there
        ir = (Path(kernel["folder"]) / f"{kernel['kernel']}.{kind}").read_text()
        assert narrow_accesses(ir) == []


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_one_binary_reads_tables_of_any_width(capability: int, compiled: Compiled) -> None:
    """Without graphs a step is as wide as its longest table; a new width must not compile."""
    (widest,) = compiled["read_table, of a graph", capability]
    (narrow,) = compiled["read_table, as wide as it must be", capability]
    assert narrow["folder"] == widest["folder"]


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize("case", ["experts, Qwen3-30B-A3B", "mx_experts, gpt-oss"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_one_binary_takes_any_number_of_pairs(
    capability: int, case: str, compiled: Compiled
) -> None:
    """A multiple of 16 or not: prompts of a new length must not compile."""
    odd, even = (
        {line["folder"] for line in compiled[f"{case}, {n} tokens", capability]}
        for n in (4001, 4096)
    )
    assert odd == even and len(odd) >= 5


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_merge_reads_after_all_parts_are_written(capability: int, compiled: Compiled) -> None:
    """All threads' writes of a part come before the count that publishes them;
    the count, then all threads' reads, past the cache of their multiprocessor."""
    case = "decode_attention, Qwen3-8B and Llama-3-8B, block size 64"
    (kernel,) = (k for k in compiled[case, capability] if k["kernel"] == "_decode_kernel")
    ptx = (Path(kernel["folder"]) / "_decode_kernel.ptx").read_text()
    count = ptx.index("atom.global.gpu.acq_rel.add")
    before, after = ptx[:count], ptx[count:]
    assert before.rindex("bar.sync") > before.rindex("st.global")
    merge = after[: after.index("st.global")]
    assert "ld.global" not in merge[: merge.index("bar.sync")]
    reads = re.findall(r"ld\.global[.\w]*", merge)
    assert len(reads) >= 2 and all(read.startswith("ld.global.cg") for read in reads)


def test_counts_of_experts_are_zeroed_after_all_threads_have_read_them(compiled: Compiled) -> None:
    """With fewer experts than threads, several threads read a count, and one of them zeroes it."""
    (kernel,) = (k for k in compiled["few_experts, 64 rows", HOPPER]
                 if k["kernel"] == "_route_kernel")  # fmt: skip
    ptx = (Path(kernel["folder"]) / "_route_kernel.ptx").read_text()
    last = ptx[ptx.rindex("atom.global.gpu.acq_rel.add") :]  # of all programs
    read = last.index("ld.global.cg")
    assert "bar.sync" in last[read : last.index("st.global", read)]


# The kernels that start while the one before them ends: a case of each.
EARLY_CASES = {
    "_linear_kernel": "few_rows, Qwen3-0.6B, 64 rows",
    "_quantized_rows_kernel": "quantized_rows, int4, groups of 128, 16 rows",
    "_norm_rope_store_kernel": "norm_rope_store, Qwen3-0.6B, 64 tokens",
    "_route_kernel": "few_experts, 64 rows",
    "_expert_rows_kernel": "few_experts, 64 rows",
    "_sum_kernel": "few_experts, 64 rows",
    "_activate_kernel": "few_experts, e4m3 blocks",
    "_add_up_kernel": "few_mx_experts, gpt-oss",
    "_mx_experts_kernel": "mx_experts, gpt-oss, 32 tokens",
}


@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize("kernel", EARLY_CASES)
def test_a_kernel_that_starts_early_waits_before_it_touches_memory(
    kernel: str, compiled: Compiled
) -> None:
    """Its inputs may still be written then, and its outputs may still be read."""
    found = [line for line in compiled[EARLY_CASES[kernel], 90] if line["kernel"] == kernel]
    assert found
    for line in found:
        ptx = (Path(line["folder"]) / f"{kernel}.ptx").read_text()
        assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dep") == 1
        touched = r"\b(ld|st|atom|red)\.global|cp\.async"
        assert not re.search(touched, ptx[: ptx.index("griddepcontrol.wait")])
        assert re.search(touched, ptx)


@pytest.mark.sampled(share=0.15)
@pytest.mark.parametrize("kernel", ["_down_kernel", "_up_kernel"])
@pytest.mark.parametrize("rows", [1, 64, 256])
def test_adapters_kernels_read_alone_before_they_wait(
    rows: int, kernel: str, compiled: Compiled
) -> None:
    """Matrices, ranks and groups, which older kernels wrote."""
    found = [line for line in compiled[f"lora, {rows} rows", HOPPER] if line["kernel"] == kernel]
    assert found
    for line in found:
        ptx = (Path(line["folder"]) / f"{kernel}.ptx").read_text()
        assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dep") == 1
        before, after = ptx.split("griddepcontrol.wait")
        assert not re.search(r"\b(st|atom|red)\.global|cp\.async", before)
        assert re.search(r"\bst\.global", after)


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize(
    "name", ["block size 64", "codes, block size 64", "5 queries, block size 64"]
)
def test_attention_reads_its_plan_alone_before_it_waits(name: str, compiled: Compiled) -> None:
    """An older kernel wrote the plan; the kernel before it writes the queries and the last keys."""
    kernel = compiled[f"decode_attention, Qwen3-0.6B, {name}", HOPPER][-1]
    ptx = (Path(kernel["folder"]) / f"{kernel['kernel']}.ptx").read_text()
    assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dep") == 1
    before, after = ptx.split("griddepcontrol.wait")
    assert len(re.findall(r"ld\.global", before)) == 4  # a program's row, tiles, length and share
    assert not re.search(r"\b(st|atom|red)\.global|cp\.async", before)
    assert "griddepcontrol.launch_dep" in after and re.search(r"cp\.async\.bulk\.tensor", after)


HOLDING = {
    "few_rows, Qwen2.5-0.5B, biases, 1 rows": "_held_kernel",
    "few_rows, Qwen3-0.6B, 1 rows": "_held_tiles_kernel",
    "few_rows, Qwen3-0.6B, 8 rows": "_held_tiles_kernel",
    "few_rows, Qwen3-0.6B, 16 rows": "_held_tiles_kernel",
}


@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize("name", HOLDING)
def test_weights_are_loaded_before_the_wait_and_nothing_is_written(
    name: str, compiled: Compiled
) -> None:
    """The kernel before it may still read what this one writes."""
    found = [line for line in compiled[name, HOPPER] if line["kernel"] == HOLDING[name]]
    assert len(found) >= 3
    for line in found:
        ptx = (Path(line["folder"]) / f"{HOLDING[name]}.ptx").read_text()
        assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dep") == 1
        before, after = ptx.split("griddepcontrol.wait")
        assert len(re.findall(r"ld\.global\.v4", before)) >= 12 and "griddepcontrol" in after
        assert not re.search(r"\b(st|atom|red)\.global|cp\.async", before)
        assert re.search(r"\bst\.global", after)


@pytest.mark.sampled(share=0.5)
@pytest.mark.parametrize("name", ["few_rows, Qwen3-0.6B, 8 rows", "few_rows, Qwen3-0.6B, 16 rows"])
def test_weights_go_from_memory_to_the_tensor_cores_in_registers(
    name: str, compiled: Compiled
) -> None:
    """A thread loads what it multiplies: nothing is exchanged between the wait and the products."""
    for line in compiled[name, HOPPER]:
        ptx = (Path(line["folder"]) / "_held_tiles_kernel.ptx").read_text()
        before = ptx[: ptx.rindex("mma.sync")]
        assert "ldmatrix" not in before
        assert before.rfind("st.shared") < before.index("mma.sync")  # of sums of squares, if any


RECURRENT = "_recurrent_kernel"


@pytest.mark.sampled(share=0.5)
@pytest.mark.parametrize(
    "name", [f"{name}, decode" for name in ("gated_delta, Qwen3-Next", "state_space, Mamba-2")]
)
def test_states_are_loaded_before_the_wait_and_nothing_is_written(
    name: str, compiled: Compiled
) -> None:
    """The kernel before it may still read what this one writes. A program has 16 KiB of a state."""
    (kernel,) = compiled[name, HOPPER]
    ptx = (Path(kernel["folder"]) / f"{RECURRENT}.ptx").read_text()
    assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dep") == 1
    before, after = ptx.split("griddepcontrol.wait")
    assert len(re.findall(r"ld\.global[^;]*\.v4", before)) == 8
    assert not re.search(r"\b(st|atom|red)\.global|cp\.async", before)
    assert len(re.findall(r"st\.global[^;]*\.v4", after)) == 8


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize("name", [f"{name}, prefill" for name in (
    "gated_delta, Qwen3-Next", "gated_delta, keys of 96", "state_space, Mamba-2"
)])  # fmt: skip
def test_chunks_are_multiplied_by_tensor_cores_and_read_ahead(
    name: str, compiled: Compiled
) -> None:
    """The next chunk is copied to shared memory while one is computed."""
    for kernel in compiled[name, HOPPER]:
        ptx = (Path(kernel["folder"]) / f"{kernel['kernel']}.ptx").read_text()
        assert ("wgmma.mma_async" in ptx) == (kernel["kernel"] != RECURRENT)
        assert ("cp.async" in ptx) == (kernel["kernel"] == "_walk_kernel")


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(ORDERED_STATES)])
def test_steps_of_all_kinds_launch_one_compiled_program(name: str, compiled: Compiled) -> None:
    """So its sums have one order: decode steps, drafts and prefills, of one row and of many."""
    assert len(compiled[name, HOPPER]) == 1


def test_convolutions_in_one_order_fuse_no_additions(compiled: Compiled) -> None:
    """Decode and prefill have kernels of their own, in which the compiler may fuse others."""
    kernels = compiled["causal_conv, one order", HOPPER]
    found = {kernel["kernel"]: kernel["folder"] for kernel in kernels}
    for name in ("_decode_kernel", "_prefill_kernel"):
        ptx = (Path(found[name]) / f"{name}.ptx").read_text()
        assert "mul.rn" in ptx and "fma" not in ptx


SHARING = "few_rows, Qwen3-0.6B, 32 rows"


def test_weights_are_copied_to_shared_memory_before_the_wait(compiled: Compiled) -> None:
    """And nothing is written: the kernel before it may still read what this one writes."""
    found = compiled[SHARING, HOPPER]
    assert len(found) == 4
    for line in found:
        ptx = (Path(line["folder"]) / "_shared_tiles_kernel.ptx").read_text()
        assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dep") == 1
        before, after = ptx.split("griddepcontrol.wait")
        assert before.count("cp.async.bulk.tensor.3d") == 4 and "wgmma.mma_async" in after
        assert "bulk.tensor.2d" not in before and after.count("cp.async.bulk.tensor.2d") == 4
        assert not re.search(r"\b(st|atom|red)\.global", before)
        assert re.search(r"\bst\.global", after)


@pytest.mark.sampled(share=0.3)
def test_codes_of_chosen_experts_are_loaded_before_the_wait(compiled: Compiled) -> None:
    """Those of the second product, whose experts an older kernel has chosen."""
    found = [line for line in compiled["few_mx_experts, gpt-oss", HOPPER]
             if line["kernel"] == "_mx_few_kernel"]  # fmt: skip
    touched = r"\b(ld|st|atom|red)\.global"
    loads = []
    for line in found:
        ptx = (Path(line["folder"]) / "_mx_few_kernel.ptx").read_text()
        assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dep") == 1
        before, after = ptx.split("griddepcontrol.wait")
        assert not re.search(r"\b(st|atom|red)\.global|cp\.async", before)
        assert re.search(touched, after)
        loads.append(len(re.findall(r"ld\.global", before)))
    assert loads == [0, 1 + 4 * 4]


@pytest.mark.sampled(share=0.1)
@pytest.mark.parametrize(
    "name",
    [
        name for name in CASES
        if name.startswith("few_rows") and name not in {*HOLDING, SHARING}
    ],
)  # fmt: skip
def test_tiles_are_copied_by_the_accelerator(name: str, compiled: Compiled) -> None:
    """By the tensor memory accelerator, into the memory that `wgmma` reads."""
    found = [line for line in compiled[name, HOPPER] if line["kernel"] == "_linear_kernel"]
    assert found, "small layers may have other kernels, but not all are small"
    for line in found:
        ptx = (Path(line["folder"]) / "_linear_kernel.ptx").read_text()
        assert "cp.async.bulk.tensor.2d" in ptx and "wgmma.mma_async" in ptx
        assert "cp.async.cg" not in ptx and "cp.async.ca" not in ptx


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize("name", [f"few_experts, {rows} rows" for rows in (1, 64, 256)])
def test_weights_of_experts_are_copied_by_the_accelerator(name: str, compiled: Compiled) -> None:
    """Those of gate and up, and those of down; the rows of a tile are gathered by its threads."""
    found = [line for line in compiled[name, HOPPER] if line["kernel"] == "_expert_rows_kernel"]
    assert len(found) == 2
    for line in found:
        ptx = (Path(line["folder"]) / "_expert_rows_kernel.ptx").read_text()
        assert "cp.async.bulk.tensor.2d" in ptx and "wgmma.mma_async" in ptx


@pytest.mark.parametrize(
    ("name", "capability"),
    [(name, capability) for name, capability in PAIRS if name.startswith("ordered_")],
)
def test_the_compiler_fuses_nothing_where_sums_have_one_order(
    name: str, capability: int, compiled: Compiled
) -> None:
    """An instruction without a kind of rounding may become a part of another one."""
    for kernel in compiled[name, capability]:
        if kernel["kernel"] != "_ordered_plan_kernel":
            ptx = (Path(kernel["folder"]) / f"{kernel['kernel']}.ptx").read_text()
            assert "fma.rn.f32" in ptx and "mul.rn.f32" in ptx
            assert not re.search(r"\b(mul|add|sub|fma)(\.ftz)?\.f32", ptx)


QUANTIZED = [name for name in CASES if name.startswith("quantized_rows") and "float32" not in name]


@pytest.mark.sampled(share=0.06)
@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_go_from_codes_to_the_tensor_cores_in_registers(
    name: str, compiled: Compiled
) -> None:
    """Their order in memory is that of `wgmma`'s left matrix: a thread loads what it multiplies."""
    for line in compiled[name, HOPPER]:
        ptx = (Path(line["folder"]) / "_quantized_rows_kernel.ptx").read_text()
        products = re.findall(r"wgmma\.mma_async.*?;", ptx, re.DOTALL)
        assert products
        assert all(re.search(r"\}, *\{[^}]*\}, *%rd", product) for product in products)
        first, last = ptx.index(products[0]), ptx.rindex(products[-1])
        assert "st.shared" not in ptx[first:last] and "ldmatrix" in ptx


BLOCK_KERNELS = {
    "block_products": "_block_products_kernel",
    "mx_experts, gpt-oss": "_mx_experts_kernel",
}


@pytest.mark.parametrize(
    ("name", "kernel"),
    [(n, kernel) for n, c in PAIRS if c == HOPPER for start, kernel in BLOCK_KERNELS.items()
     if n.startswith(start)],
)  # fmt: skip
def test_values_of_blocks_are_multiplied_where_they_are_computed(
    name: str, kernel: str, compiled: Compiled
) -> None:
    """A thread loads the codes that it multiplies: no value passes through shared memory."""
    found = [line for line in compiled[name, HOPPER] if line["kernel"] == kernel]
    assert found
    for line in found:
        ptx = (Path(line["folder"]) / f"{kernel}.ptx").read_text()
        first, last = ptx.index("wgmma.mma_async"), ptx.rindex("wgmma.mma_async")
        assert "st.shared" not in ptx[first:last]  # rows of x may be stored before all products


@pytest.mark.sampled(share=0.2)
@pytest.mark.parametrize(
    ("name", "copied"),
    [
        ("decode_attention, Qwen3-8B and Llama-3-8B, block size 64", True),
        ("decode_attention, Qwen3-8B and Llama-3-8B, block size 16", False),
        ("decode_attention, Qwen3-8B, eager, block size 64", False),
        ("decode_attention, Qwen3-8B and Llama-3-8B, codes, block size 64", True),
        ("decode_attention, Qwen3-8B, codes, eager, block size 64", False),
        ("prefill_attention, Qwen3-8B and Llama-3-8B, many tokens, block size 0", True),
        ("prefill_attention, Qwen3-8B and Llama-3-8B, block size 0", False),
        ("prefill_attention, Qwen3-8B and Llama-3-8B, block size 64", False),
    ],
)
def test_keys_are_copied_exactly_where_that_is_faster(
    name: str, copied: bool, compiled: Compiled
) -> None:
    """Elsewhere, neither a graph nor enough work hides the slow launches."""
    kernel = compiled[name, HOPPER][-1]
    assert "error" not in kernel, "it does not compile"
    ptx = (Path(kernel["folder"]) / f"{kernel['kernel']}.ptx").read_text()
    assert ("cp.async.bulk.tensor.2d" in ptx) == copied


@pytest.mark.sampled(share=0.2)
@pytest.mark.parametrize(
    ("name", "capability", "copied"),
    [
        ("experts, Qwen3-30B-A3B, 4096 tokens", HOPPER, True),
        ("experts, Qwen3-30B-A3B, 4096 tokens", 80, False),
        ("experts, Qwen3-30B-A3B, 4096 tokens", 120, False),
        ("experts, Qwen3-30B-A3B, 64 tokens", HOPPER, True),
        ("experts, sizes that tiles do not divide", HOPPER, True),
    ],
)
def test_experts_of_many_pairs_are_copied_where_that_is_possible(
    name: str, capability: int, copied: bool, compiled: Compiled
) -> None:
    """Weights by the tensor memory accelerator, and as whole tiles of gate and up."""
    kernels = {line["kernel"]: line for line in compiled[name, capability]}
    for kernel in ("_gated_kernel", "_down_kernel"):
        ptx = (Path(kernels[kernel]["folder"]) / f"{kernel}.ptx").read_text()
        assert ("cp.async.bulk.tensor.3d" in ptx) == copied
        assert ("m64n256k16" in ptx) == (copied and kernel == "_gated_kernel")


def loops(cubin: Path) -> list[list[str]]:
    """The instructions of each loop of a binary that contains no other loop."""
    import triton

    disassembler = triton.knobs.nvidia.nvdisasm.path
    command = [disassembler, "-c", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions: list[str] = []
    labels: dict[str, int] = {}
    found: list[tuple[int, int]] = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            target = re.search(r"BRA.*`\((\.L_\w+)\)", instruction[1])
            instructions.append(instruction[1])
            if target and target[1] in labels:
                found.append((labels[target[1]], len(instructions)))
    return [
        instructions[a:b] for a, b in found if not any(a <= c and d < b for c, d in found)
    ]  # fmt: skip


@pytest.mark.sampled(share=0.05)
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("hopper_prefill")])
def test_the_softmax_is_between_issue_and_end_of_products(name: str, compiled: Compiled) -> None:
    """The assembler may move the wait for products to before the softmax: then nothing overlaps."""
    (kernel,) = compiled[name, HOPPER]
    assert kernel["kernel"] == HOPPER_PREFILL
    cubin = Path(kernel["folder"]) / f"{HOPPER_PREFILL}.cubin"
    multiplying = [loop for loop in loops(cubin) if any("HGMMA" in line for line in loop)]
    assert len(multiplying) == 4  # of two warpgroups: tiles seen by all queries, and others
    for loop in multiplying:
        products = [i for i, line in enumerate(loop) if "HGMMA" in line]
        waits = [i for i, line in enumerate(loop) if "WARPGROUP.DEPBAR" in line]
        powers = [i for i, line in enumerate(loop) if "MUFU.EX2" in line]
        assert len(waits) == 2 and len(powers) >= 64
        assert products[-1] < waits[0] < powers[0] and powers[-1] < waits[1]
