"""Every kernel compiled for three GPUs, none of which is needed for that. `CASES` is the table."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ahead_of_time
import pytest
from ahead_of_time import CAPABILITIES, CASES

Compiled = dict[tuple[str, int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The kernels of each case and capability, from a process where Triton does not interpret."""
    pytest.importorskip("triton")
    root = str(Path(__file__).resolve().parents[2])
    env = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root])),
    }
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, ahead_of_time.__file__],
        env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=600,
    )  # fmt: skip
    results: Compiled = {}
    for line in map(json.loads, done.stdout.splitlines()):
        results.setdefault((line["case"], line["capability"]), []).append(line)
    return results


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", CASES)
def test_kernel_does_not_compile_spills_or_does_not_fit(
    name: str, capability: int, compiled: Compiled
) -> None:
    """A spilled register costs two trips to memory; too much shared memory fails at the launch."""
    for kernel in compiled[name, capability]:
        if "error" in kernel:
            pytest.fail(kernel["error"], pytrace=False)
        spilled, shared = kernel["spill_bytes"], kernel["shared_bytes"]
        assert shared <= CAPABILITIES[capability], f"{kernel['kernel']} asks for {shared} bytes"
        assert spilled <= CASES[name].max_spill, f"{kernel['kernel']} spills {spilled} bytes"


def caches_reached(ir: str) -> set[str]:
    """The pointers that what is read at `slots_ptr` or `tables_ptr` is added to, in 64 bits.

    A pass over Triton's IR in its order: `base` has the argument that a pointer comes from, and
    `cached` the numbers that come from a slot or a block. None may be smaller when it grows.
    """
    base: dict[str, str] = {}
    cached: set[str] = set()
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
        if op == "tt.load" and base[name] in ("%slots_ptr", "%tables_ptr"):
            cached.add(name)
        elif op == "tt.addptr" and others[0] in cached:
            assert wide, f"32 bits: {line}"
            reached.add(base[name].removeprefix("%"))
        elif op in ("arith.cmpi", "tt.addptr", "tt.load"):
            continue
        elif cached.intersection((first, *others)):
            assert wide or op == "arith.extsi", f"32 bits: {line}"
            cached.add(name)
    return reached


# The block size 0 is for no cache.
CACHED = ("store_kvcache", "norm_rope_store", "decode_attention", "prefill_attention")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    "name",
    [name for name in CASES if name.startswith(CACHED) and not name.endswith("block size 0")],
)
def test_place_in_the_cache_is_computed_in_32_bits(
    name: str, capability: int, compiled: Compiled
) -> None:
    """A cache above 2 GiB, where a token goes to another's slot or outside of the cache."""
    kernel = compiled[name, capability][-1]  # what plans the attention comes before it
    if "error" in kernel:
        pytest.fail("it does not compile")
    ir, ptx = (
        (Path(kernel["folder"]) / f"{kernel['kernel']}.{kind}").read_text()
        for kind in ("ttir", "ptx")
    )
    assert f".target sm_{capability}" in ptx
    assert caches_reached(ir) in ({"k_cache_ptr", "v_cache_ptr"}, {"k_ptr", "v_ptr"}), ir
