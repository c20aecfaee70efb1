"""A dry run: calls whose kernels are compiled, many at the same time, and not launched.

Triton compiles a kernel at its first launch, so without this a start compiles one after the other.
Its compiler runs outside of Python's lock: threads are enough.

What such calls compute is wrong, so their results are dropped. New tensors hold zeros in a dry run:
the ids, positions and slots that no kernel has written are valid, and PyTorch's own kernels, which
do run, read no memory out of bounds.
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
from triton.runtime import driver

LOCK = threading.Lock()  # one dry run of a process at a time: each replaces `JITFunction.run`
UNINITIALIZED = {
    torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
}  # fmt: skip


def dry_run(call: Callable[[], object], num_threads: int) -> None:
    """Call it, and wait until all kernels that it would have launched are compiled.

    The launch of a kernel that did not compile raises the compiler's error.
    """
    with LOCK, ThreadPoolExecutor(num_threads) as pool:
        # Triton's mode is a variable of a context: in a copy, it ends with the call in any case.
        copy_context().run(_compile_only, call, pool)


def _compile_only(call: Callable[[], object], pool: ThreadPoolExecutor) -> None:
    run, thread = JITFunction.run, threading.get_ident()

    def compile_in_thread(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        is_dry = threading.get_ident() == thread  # other threads launch
        return run(self, *args, warmup=warmup or is_dry, **kwargs)

    with Compilers(pool), _Zeros():
        JITFunction.run = compile_in_thread
        try:
            call()
        finally:
            JITFunction.run = run


class Compilers(AsyncCompileMode):  # type: ignore[misc]
    """Triton's own mode in which kernels are compiled by a pool, each once.

    So are their launchers: Triton 3.6 has a C program for each, which takes a third of a second.
    """

    raw_futures: list[Future[Any]]

    def submit(self, key: str, compile_fn: Any, finalize_fn: Callable[[Any], None]) -> Any:
        def compile_all() -> Any:
            compiled = compile_fn()
            with suppress(Exception):  # the launch makes it again, and raises its error
                driver.active.launcher_cls(compiled.src, compiled.metadata)
            return compiled

        kernel = super().submit(key, compile_all, finalize_fn)
        finalize_fn(kernel)  # so that the next launch finds it, and does not hash its source again
        return kernel

    def __exit__(self, *error: object) -> None:
        """Wait for all. What failed stays where launches find it, and is raised by those."""
        self.raw_futures = [future for future in self.raw_futures if not future.exception()]
        super().__exit__(*error)


class _Zeros(TorchFunctionMode):
    """Fill what PyTorch would leave as it is.

    Not a mode of dispatch: the first one of a process imports PyTorch's compiler, for seconds.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in UNINITIALIZED else made
