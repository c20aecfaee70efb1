"""WeightCalls: the engine's calls that change or read weights."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch

from nanovllm.engine.errors import NotReadyError
from nanovllm.engine.llm_engine import LLMEngine, exclusive
from nanovllm.engine.requests.request import Request
from nanovllm.engine.weights.held import HeldWeights, held_weights
from nanovllm.engine.weights.known import tied_error
from nanovllm.engine.weights.state import WeightsState
from nanovllm.engine.weights.update import (
    Apply,
    AreHeld,
    Finish,
    Given,
    Load,
    Read,
    Reload,
    assembled,
    batches,
    pairs,
)
from nanovllm.utils.checks import as_list, check_choice, shorten

Running = Literal["refuse", "abort"]
Weights = Mapping[str, Any] | Iterable[tuple[str, Any]]
RUNNING: tuple[Running, ...] = ("refuse", "abort")


class WeightCalls(LLMEngine):
    """`update_weights`, `reload_weights`, `get_weights` and `apply_model`.

    While weights are missing, or the engine sleeps, requests are refused: `refusal` says why. It
    is that of `_weights`.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self._weights = WeightsState()
        super().__init__(model, **options)

    def update_weights(self, weights: Weights, *, running: Running = "refuse") -> None:
        """Replace weights by the tensors of an iterable of (name, tensor), or of a dict.

        Names and shapes are those of the checkpoint; an update may have only some of them. Floats
        are converted to the model's type, and quantized again if the engine has quantized them. A
        tensor is on any device, or it is a handle of `torch.multiprocessing`'s `reduce_tensor`.
        A list or a dict is checked before anything changes. Of another iterable, tensors are loaded
        as they come: if it fails in the middle, requests are refused until all weights are updated.

        The prefix cache is emptied. Waiting requests go on with the new weights; if there are
        requests that have begun, `running="refuse"` raises, and "abort" ends them.
        """
        self._check_ready("update_weights")
        self._check_running(running, "update_weights")
        chunks = self._checked(weights)
        first = next(chunks, [])
        try:
            self._begin_update()
            self._load(first)
            for chunk in chunks:
                self._load(chunk)
        except BaseException:
            self._give_up()
            raise
        self.end_update()

    def begin_update(self, running: Running = "refuse") -> None:
        """Begin an update in parts: `load_weights` for each, then `end_update`."""
        self._check_ready("begin_update")
        self._check_running(running, "begin_update")
        self._begin_update()

    def load_weights(self, weights: list[tuple[str, Any]]) -> None:
        """Load a part of an update. If it raises, the update is given up, as by `cancel_update`."""
        self.check_alive()
        self._weights.check_open("load_weights")
        try:
            for chunk in self._checked(weights, together=False):
                self._load(chunk)
        except BaseException:
            self._give_up()
            raise

    def end_update(self) -> None:
        """End an update: requests run with the new weights."""
        self.check_alive()
        self._weights.check_open("end_update")
        try:
            self._finish_update(True)
        except BaseException:
            self._give_up()
            raise
        self._weights.end()
        self._settle()

    def cancel_update(self) -> None:
        """End an update that cannot be completed, if it has not ended."""
        if self._weights.is_updating:
            self._give_up()

    def reload_weights(self, *, running: Running = "refuse") -> None:
        """Load all weights of the checkpoint again."""
        self._check_ready("reload_weights")
        self._check_running(running, "reload_weights")
        try:
            self._begin_update()
            self._reload()
        except BaseException:
            self._give_up()
            raise
        self._weights.end()
        self._settle()

    def get_weights(self, names: str | Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Copies of weights on the host, by the checkpoint's names; all of them by default.

        Quantized weights cannot be read.
        """
        self._check_ready("get_weights")
        self._weights.check_whole()
        held = self._held
        names = [names] if isinstance(names, str) else names
        wanted = (
            sorted(held.known.parts)
            if names is None
            else as_list("names", names, "a list of names")
        )
        for name in wanted:
            if not isinstance(name, str):
                raise TypeError(f"names must be names of tensors, got {shorten(name)}")
            held.known[name]  # or it is a ValueError
        return {name: self._read(name) for name in wanted}

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of all tensors that an update may have, with nothing fused."""
        self.check_alive()
        return self._held.known.shapes

    def apply_model(self, function: Callable[[torch.nn.Module], Any]) -> list[Any]:
        """Call a function with every rank's model, a `torch.nn.Module`; rank 0's result is first.

        Layers are bound: a linear layer has its weight in `matrix`, in the layout of the kernels,
        and q, k and v, or gate and up, are one layer. Norms and the embedding are parameters. After
        a function that changes weights, call `reset_prefix_cache`. With several ranks, functions of
        the caller's script need the package cloudpickle.
        """
        self.check_alive()
        self._weights.check_awake("apply_model")
        if not callable(function):
            raise TypeError(f"apply_model takes a function of a model, got {function!r}")
        return self._apply(function)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Running requests keep their blocks. Returns True, as in vLLM."""
        self.check_alive()
        self.scheduler.clear_cache()
        return True

    @property
    def _held(self) -> HeldWeights:
        """Rank 0's weights: names and shapes are the same on all ranks."""
        with self.model_runner.shard.computing():
            return held_weights(self.model_runner.shard)

    def _checked(self, weights: Weights, together: bool = True) -> Iterator[list[Given]]:
        """The tensors in parts, each checked as a whole."""
        items = pairs(weights)
        is_all = isinstance(items, list | tuple)
        for chunk in batches(items):
            held = self._held
            chunk = [one for one in chunk if not held.known.blank.names.is_skipped(one.name)]
            tensors = {one.name: one.tensor for one in chunk}
            for name, tensor, _ in chunk:
                held.known.check(name, tensor)
            if is_all and together:
                held.known.check_once(one.name for one in chunk)
                held.check_together(tensors, self._weights.missing)
            held.known.check_tied(tensors)
            yield chunk

    def _check_ready(self, call: str) -> None:
        """Raise if the weights cannot be read, or replaced, as a whole."""
        self.check_alive()
        self._weights.check_awake(call)
        self._weights.check_closed(call)

    def _check_running(self, running: Running, call: str) -> None:
        """Raise if there are requests that have begun, unless they are to be aborted."""
        check_choice("running", running, RUNNING)
        if running == "refuse" and (begun := self._begun_requests()):
            are_running = "1 request is" if len(begun) == 1 else f"{len(begun)} requests are"
            raise NotReadyError(
                f'{call} while {are_running} running: finish or abort them, or pass running="abort"'
            )

    def _begun_requests(self) -> list[Request]:
        """Those that have been computed in part, also if they wait again: they were preempted."""
        return [r for r in self.unfinished.values() if r.times.scheduled is not None]

    def _stop_all(self) -> None:
        """Abort what has begun, and start over with what waits; nothing is cached.

        Aborted requests are returned as finished ones are.
        """
        begun = self._begun_requests()
        self._recover([*self.unfinished.values(), *self.finished.values()])
        for request in begun:
            self.finished[request.request_id] = self.unfinished.pop(request.request_id)
            self._end(request)

    @exclusive
    def _begin_update(self) -> None:
        self._stop_all()
        self._weights.begin()
        self._settle()

    @exclusive
    def _load(self, weights: list[Given]) -> None:
        if not weights:
            return
        self._check_tied(weights)
        self._weights.has_changed = True
        self.model_runner.everywhere(Load(weights))
        if self._weights.missing:
            self._weights.missing -= self._held.known.parts_of(one.name for one in weights)

    def _check_tied(self, weights: list[Given]) -> None:
        """Raise if a tied tensor differs from what this update has loaded by its other name."""
        known, loaded = self._held.known, self._weights.loaded_tied
        named = [(known[one.name].name, one) for one in weights]
        for name, one in named:
            other = known.other_names.get(name)
            if other in loaded and not all(self.model_runner.everywhere(AreHeld([one]))):
                raise tied_error(name, other)
        loaded.update(known.other_names.keys() & dict(named))

    @exclusive
    def _finish_update(self, succeeds: bool) -> None:
        self.model_runner.everywhere(Finish(succeeds, self._weights.missing))

    @exclusive
    def _reload(self) -> None:
        self._weights.has_changed = True
        self.model_runner.everywhere(
            Reload(self.model_path, self._asked.load_format == "dummy", self._asked.seed)
        )
        self._weights.missing = frozenset()

    def _give_up(self) -> None:
        """After an update that failed: if a weight has changed, all must be updated."""
        if not self._weights.is_updating:
            return
        if self.model_runner.failure is not None or not self._finalizer.alive:
            return  # a rank has ended, and so has the engine
        self._weights.give_up(self._held.known.parts)
        self._settle()
        if self._weights.has_changed:
            self._finish_update(False)

    @exclusive
    def _read(self, name: str) -> torch.Tensor:
        return assembled(self.model_runner.everywhere(Read(name)))

    @exclusive
    def _apply(self, function: Callable[[torch.nn.Module], Any]) -> list[Any]:
        return self.model_runner.everywhere(Apply(function))

    def _settle(self) -> None:
        """Say why requests are refused, if they are. Adapters are not read meanwhile."""
        self.refusal = self._weights.refusal
        if self.adapters is not None:
            self.adapters.store.refuse(self.refusal)
