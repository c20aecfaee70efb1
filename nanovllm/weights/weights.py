"""Weights: reads, replaces and frees an engine's weights for callers."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch

from nanovllm.engine.errors import NotReadyError
from nanovllm.engine.exclusive import exclusive
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.requests.request import Request
from nanovllm.utils.checks import as_list, check_choice, shorten
from nanovllm.weights.live import LiveWeights, live_weights
from nanovllm.weights.named_tensors import tied_error
from nanovllm.weights.update import (
    Apply,
    AreHeld,
    Finish,
    Given,
    LoadWeights,
    Read,
    Reload,
    assembled,
    batches,
    pairs,
)
from nanovllm.weights.update_state import WeightsState

Running = Literal["refuse", "abort"]
NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
RUNNING: tuple[Running, ...] = ("refuse", "abort")


class Weights:
    """Reads, replaces and frees the weights of an engine.

    While weights are missing or the engine sleeps, the engine refuses requests, as `state` says.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.state = WeightsState()

    def update_weights(self, weights: NamedTensors, *, running: Running = "refuse") -> None:
        """Replace weights: see `LLM.update_weights`."""
        self._check_ready("update_weights")
        self.check_running(running, "update_weights")
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
        self.check_running(running, "begin_update")
        self._begin_update()

    def load_weights(self, weights: list[tuple[str, Any]]) -> None:
        """Load a part of an update. If it raises, the update is given up, as by `cancel_update`."""
        self.engine.check_alive()
        self.state.check_open("load_weights")
        try:
            for chunk in self._checked(weights, together=False):
                self._load(chunk)
        except BaseException:
            self._give_up()
            raise

    def end_update(self) -> None:
        """End an update: requests run with the new weights."""
        self.engine.check_alive()
        self.state.check_open("end_update")
        try:
            self._finish_update(True)
        except BaseException:
            self._give_up()
            raise
        self.state.end()
        self.settle()

    def cancel_update(self) -> None:
        """End an update that cannot be completed, if it has not ended."""
        if self.state.is_updating:
            self._give_up()

    def reload_weights(self, *, running: Running = "refuse") -> None:
        """Load all weights of the checkpoint again."""
        self._check_ready("reload_weights")
        self.check_running(running, "reload_weights")
        try:
            self._begin_update()
            self._reload()
        except BaseException:
            self._give_up()
            raise
        self.state.end()
        self.settle()

    def get_weights(self, names: str | Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Copies of weights on the host, by the checkpoint's names; all of them by default."""
        self._check_ready("get_weights")
        self.state.check_whole()
        held = self.held
        names = [names] if isinstance(names, str) else names
        wanted = (
            sorted(held.known.parts)
            if names is None
            else as_list("names", names, "a list of names")
        )
        for name in wanted:
            if not isinstance(name, str):
                raise TypeError(f"names must be names of tensors, got {shorten(name)}")
            held.known[name]  # raises a ValueError for an unknown name
        return {name: self._read(name) for name in wanted}

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of all tensors that an update may have, without fused tensors."""
        self.engine.check_alive()
        return self.held.known.shapes

    def apply_model(self, function: Callable[[torch.nn.Module], Any]) -> list[Any]:
        """Call a function with every rank's model: see `LLM.apply_model`."""
        self.engine.check_alive()
        self.state.check_awake("apply_model")
        if not callable(function):
            raise TypeError(f"apply_model takes a function of a model, got {function!r}")
        return self._apply(function)

    @property
    def held(self) -> LiveWeights:
        """Rank 0's weights: names and shapes are the same on all ranks."""
        with self.engine.model_runner.shard.computing():
            return live_weights(self.engine.model_runner.shard)

    def _checked(self, weights: NamedTensors, together: bool = True) -> Iterator[list[Given]]:
        """The tensors in parts, each checked as a whole."""
        items = pairs(weights)
        is_all = isinstance(items, list | tuple)
        for chunk in batches(items):
            held = self.held
            chunk = [one for one in chunk if not held.known.blank.names.is_skipped(one.name)]
            tensors = {one.name: one.tensor for one in chunk}
            for name, tensor, _ in chunk:
                held.known.check(name, tensor)
            if is_all and together:
                held.known.check_once(one.name for one in chunk)
                held.check_together(tensors, self.state.missing)
            held.known.check_tied(tensors)
            yield chunk

    def _check_ready(self, call: str) -> None:
        """Raise if the weights cannot be read, or replaced, as a whole."""
        self.engine.check_alive()
        self.state.check_awake(call)
        self.state.check_closed(call)

    def check_running(self, running: Running, call: str) -> None:
        """Raise if there are requests that have begun, unless they are to be aborted."""
        check_choice("running", running, RUNNING)
        if running == "refuse" and (begun := self._begun_requests()):
            are_running = "1 request is" if len(begun) == 1 else f"{len(begun)} requests are"
            raise NotReadyError(
                f'{call} while {are_running} running: finish or abort them, or pass running="abort"'
            )

    def _begun_requests(self) -> list[Request]:
        """Requests that were computed in part, including preempted ones, which wait again."""
        unfinished = self.engine.requests.unfinished.values()
        return [request for request in unfinished if request.times.scheduled is not None]

    def stop_all(self) -> None:
        """Abort requests that have begun, and restart those that wait; empty the prefix cache.

        Aborted requests are returned like finished ones.
        """
        begun, requests = self._begun_requests(), self.engine.requests
        self.engine.recover(requests.all)
        for request in begun:
            requests.abort(request, keeps_output=True)

    @exclusive
    def _begin_update(self) -> None:
        self.stop_all()
        self.state.begin()
        self.settle()

    @exclusive
    def _load(self, weights: list[Given]) -> None:
        if not weights:
            return
        self._check_tied(weights)
        self.state.has_changed = True
        self.engine.model_runner.everywhere(LoadWeights(weights))
        if self.state.missing:
            self.state.missing -= self.held.known.parts_of(one.name for one in weights)

    def _check_tied(self, weights: list[Given]) -> None:
        """Raise if a tied tensor differs from what this update has loaded by its other name."""
        known, loaded = self.held.known, self.state.loaded_tied
        named = [(known[one.name].name, one) for one in weights]
        for name, one in named:
            other = known.other_names.get(name)
            if other in loaded and not all(self.engine.model_runner.everywhere(AreHeld([one]))):
                raise tied_error(name, other)
        loaded.update(known.other_names.keys() & dict(named))

    @exclusive
    def _finish_update(self, succeeds: bool) -> None:
        self.engine.model_runner.everywhere(Finish(succeeds, self.state.missing))

    @exclusive
    def _reload(self) -> None:
        self.state.has_changed = True
        engine, asked = self.engine, self.engine.asked
        engine.model_runner.everywhere(
            Reload(engine.model_path, asked.load_format == "dummy", asked.seed)
        )
        self.state.missing = frozenset()

    def _give_up(self) -> None:
        """End a failed update: if a weight has changed, all weights must be updated."""
        if not self.state.is_updating:
            return
        if self.engine.model_runner.failure is not None or not self.engine.is_open:
            return  # a rank has ended, and the engine with it
        self.state.give_up(self.held.known.parts)
        self.settle()
        if self.state.has_changed:
            self._finish_update(False)

    @exclusive
    def _read(self, name: str) -> torch.Tensor:
        return assembled(self.engine.model_runner.everywhere(Read(name)))

    @exclusive
    def _apply(self, function: Callable[[torch.nn.Module], Any]) -> list[Any]:
        return self.engine.model_runner.everywhere(Apply(function))

    def settle(self) -> None:
        """Make the engine refuse requests, or accept them again."""
        self.engine.refuse(self.state.refusal)
