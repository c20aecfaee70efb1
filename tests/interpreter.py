"""Triton's interpreter for the tests: it rounds as GPUs do, and does nothing that has no effect."""

import functools
from typing import Any

import numpy as np
import torch


@functools.cache
def patch_interpreter() -> None:
    """Let Triton's interpreter in this process round as GPUs do, and take less time."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    call = interpreter.InterpretedFunction.__call__
    get_np_dtype = interpreter._get_np_dtype
    reduce = interpreter.ReduceOps.generic_reduce
    init_block = core.block_type.__init__
    init_tensor = core.tensor.__init__
    patched: set[str] = set()
    np_dtypes: dict[str, Any] = {}
    shapes: dict[Any, Any] = {}
    tensor_shapes: dict[Any, Any] = {}

    def rounding(x: Any, source: Any, target: Any, mode: Any) -> Any:
        """GPUs round float32 to narrower types; the interpreter cuts it off."""
        if source.name == "fp32" and target.name == "bf16":
            return torch.tensor(x).bfloat16().view(torch.uint16).numpy()
        if source.name == "fp32" and target.name == "fp8e4nv":
            return torch.tensor(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(x, source, target, mode)

    def quick_call(function: Any, *args: Any, **kwargs: Any) -> Any:
        """The interpreter patches Triton's language at each call; once for each module will do."""
        module = function.fn.__module__
        if module in patched:
            return function.rewrite()(*args, **kwargs)
        patched.add(module)
        return call(function, *args, **kwargs)

    def quick_reduce(operation: Any, inputs: Any) -> Any:
        """The interpreter combines one element after the other; GPUs combine pairs, too."""
        parts = [(x.handle.data, x.dtype) for x in inputs]
        if operation.axis != 0 or operation.keep_dims or parts[0][0].ndim != 1:
            return reduce(operation, inputs)
        while (length := len(parts[0][0])) > 1:
            even, odd = (
                [operation.to_tensor(data[start : length - length % 2 : 2], t) for data, t in parts]
                for start in (0, 1)
            )
            pairs = operation.combine_fn.fn(*even, *odd)
            pairs = pairs if isinstance(pairs, tuple) else (pairs,)
            parts = [
                (np.concatenate([pair.handle.data, data[length - length % 2 :]]), t)
                for pair, (data, t) in zip(pairs, parts, strict=True)
            ]
        return [operation.to_tensor(data[0], t) for data, t in parts]

    def quick_block(self: Any, element_type: Any, shape: Any) -> None:
        """The interpreter checks and describes a shape for each result of an operation."""
        key = tuple(map(core._unwrap_if_constexpr, shape))
        if key not in shapes:
            init_block(self, element_type, shape)
            shapes[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_type
        self.shape, self.numel, text = shapes[key]
        self.name = f"<{text}, {element_type}>"

    def quick_tensor(self: Any, handle: Any, type_: Any) -> None:
        key = tuple(type_.shape.values) if type_.is_block() else ()
        if key not in tensor_shapes:
            init_tensor(self, handle, type_)
            tensor_shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type_, type_.scalar
        self.shape, self.numel = tensor_shapes[key]

    def quick_np_dtype(type_: Any) -> Any:
        """The interpreter builds a table at each call."""
        name = type_.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = get_np_dtype(type_)
        return np_dtypes[name]

    def no_check(*_: Any) -> None:
        """Overflows are looked for, and not reported unless kernels are debugged."""

    interpreter.InterpretedFunction.__call__ = quick_call
    interpreter._get_np_dtype = quick_np_dtype
    interpreter.ReduceOps.generic_reduce = quick_reduce
    interpreter._convert_float = rounding
    core.block_type.__init__ = quick_block
    core.tensor.__init__ = quick_tensor
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = no_check
