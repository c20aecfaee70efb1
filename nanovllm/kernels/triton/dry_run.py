"""Dry runs: calls that compile their kernels, many at the same time, and do not launch them.

Triton compiles a kernel at its first launch. Without a dry run, an engine's start would compile one
kernel after the other. The compiler runs outside of Python's lock, so threads are enough.

The results of such calls are wrong, and are dropped. New tensors are filled with zeros in a dry
run. So ids, positions and slots that no kernel has written are valid, and PyTorch's own kernels,
which do run, do not read memory out of bounds.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import AsyncCompileMode, JITFunction

LOCK = threading.Lock()  # one dry run of a process at a time: each replaces `JITFunction.run`
UNINITIALIZED = {
    torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
}  # fmt: skip


def dry_run(call: Callable[[], object], num_threads: int, device: torch.device) -> None:
    """Call it, and wait until all kernels that it would have launched are on the device.

    If a kernel does not compile, its launch later raises the compiler's error.
    """
    use_device = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
    with LOCK, ThreadPoolExecutor(num_threads, "", *use_device) as pool:
        # Triton's mode is a context variable: in a copied context, it ends with the call.
        copy_context().run(_compile_only, call, pool)


def _compile_only(call: Callable[[], object], pool: ThreadPoolExecutor) -> None:
    run, thread = JITFunction.run, threading.get_ident()

    def compile_in_thread(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        is_dry = threading.get_ident() == thread  # other threads still launch
        return run(self, *args, warmup=warmup or is_dry, **kwargs)

    with Compilers(pool), _Zeros():
        JITFunction.run = compile_in_thread
        try:
            call()
        finally:
            JITFunction.run = run


class Compilers(AsyncCompileMode):  # type: ignore[misc]
    """Triton's mode in which a pool compiles kernels, each once, and loads them on the device.

    That makes a launcher, too, which is a C program in Triton 3.6: compiling it takes a third of a
    second.
    """

    raw_futures: list[Future[Any]]

    def submit(self, key: str, compile_fn: Any, finalize_fn: Callable[[Any], None]) -> Any:
        def compile_all() -> Any:
            compiled = compile_fn()
            with suppress(Exception):  # the launch tries again, and raises the error
                compiled._init_handles()
            return compiled

        kernel = super().submit(key, compile_all, finalize_fn)
        finalize_fn(kernel)  # the next launch then finds it without hashing its source
        return kernel

    def __exit__(self, *error: object) -> None:
        """Wait for all kernels. Errors are kept for the launches, which raise them."""
        self.raw_futures = [future for future in self.raw_futures if not future.exception()]
        super().__exit__(*error)


class _Zeros(TorchFunctionMode):
    """Fill new tensors with zeros if PyTorch would not initialize them.

    This is not a dispatch mode, because the first one of a process imports PyTorch's compiler,
    which takes seconds.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in UNINITIALIZED else made
