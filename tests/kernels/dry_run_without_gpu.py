"""A dry run of three kernels for a GPU that is absent; prints what held, as a line of JSON.

In a process of its own, as Triton must be imported without TRITON_INTERPRET.
"""

import json
import sys
import threading
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from ahead_of_time import AbsentGPU
from triton.runtime import driver

from nanovllm.kernels.triton.dry_run import dry_run


@triton.jit
def _fill_kernel(out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out_ptr + tl.arange(0, N), 1.0)


@triton.jit
def _broken_kernel(out_ptr):  # type: ignore[no-untyped-def]
    tl.static_assert(False, "it is broken")


class GPU(AbsentGPU):
    launchers: ClassVar[list[str]] = []

    @classmethod
    def launcher_cls(cls, source: Any, metadata: Any) -> None:
        assert metadata.num_warps == 4
        cls.launchers.append(threading.current_thread().name)
        raise OSError("no C compiler")


def main() -> None:
    threads: list[str] = []
    made: list[torch.Tensor] = []

    def listen(**_: Any) -> None:
        threads.append(threading.current_thread().name)

    def call() -> None:
        out = torch.empty(64)
        made.append(out)
        made.append(out.new_empty(3, 4, dtype=torch.bfloat16))
        made.append(torch.empty_like(out, dtype=torch.int32))
        for _ in range(3):
            _fill_kernel[(1,)](out, N=64)
        _fill_kernel[(1,)](out, N=32)
        _broken_kernel[(1,)](out)

    driver.set_active(GPU(90))
    triton.knobs.compilation.listener = listen
    run = triton.JITFunction.run
    dry_run(call, 2, torch.device("cpu"))
    kernels = list(_fill_kernel.device_caches[90][0].values())
    error = ""
    try:
        _broken_kernel[(1,)](torch.empty(64))
    except Exception as raised:
        error = str(raised)
    found = {
        "compiled": [type(kernel).__name__ for kernel in kernels],
        "in_threads": len(threads) == 2 and "MainThread" not in threads,
        "zeros": not any(part.any() for part in made),
        "launchers_in_threads": len(GPU.launchers) == 2 and "MainThread" not in GPU.launchers,
        "error": error,
        "imports_pytorchs_compiler": "torch._dynamo" in sys.modules,
        "launches_again": triton.JITFunction.run is run,
        "threads_left": threading.active_count() - 1,
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
