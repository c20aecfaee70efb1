"""vLLM's `collective_rpc`: a function is called with the worker of every rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from nanovllm.from_vllm.names.python import OF_WORKERS
from nanovllm.from_vllm.refusals import refuse_others
from nanovllm.utils.checks import shorten


class Worker:
    """What a function reads of its rank: the model, as vLLM's workers have it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.model_runner = SimpleNamespace(model=model)

    def get_model(self) -> Any:
        """The rank's model, a `torch.nn.Module`."""
        return self.model


@dataclass(frozen=True)
class Call:
    """A call of a function with a worker; it can be sent to other ranks if its parts can."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, model: Any) -> Any:
        return self.function(Worker(model), *self.args, **self.kwargs)


def collective_rpc(
    llm: Any,
    method: Callable[..., Any] | str,
    timeout: float | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **others: Any,
) -> list[Any]:
    """Call `method(worker, *args, **kwargs)` on every rank; rank 0's result is first.

    A worker has the rank's model as `model`, `model_runner.model` and `get_model()`. Functions
    reach other ranks as those of `LLM.apply_model`. Methods of vLLM's workers, as texts, are
    refused with what to use.
    """
    refuse_others("collective_rpc", others | {"timeout": timeout})
    results: list[Any] = llm.apply_model(call_of(method, args, kwargs))
    return results


def call_of(
    method: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Call:
    """The call of a function with a worker; raises for a method of vLLM's workers."""
    if isinstance(method, str):
        why = OF_WORKERS.get(method, "pass a function of a worker; see LLM.apply_model")
        raise ValueError(f"collective_rpc: workers have no method {method!r}: {why}")
    if not callable(method):
        raise TypeError(f"collective_rpc: method must be a function, got {shorten(method)}")
    return Call(method, tuple(args), dict(kwargs or {}))
