"""WeightsState: whether an engine's weights are complete and in memory; refuses calls if not."""

from collections.abc import Iterable

from nanovllm.engine.errors import AsleepError, NotReadyError
from nanovllm.weights.sleeping import Memory

TORN = "an update of the weights has failed, so that old and new ones are mixed"
DROPPED = "sleep(level=2) has dropped the weights"
WAY_OUT = "update all of them with update_weights(), or call reload_weights()"


class WeightsState:
    """The state of an engine's weights. `refusal` says why no request can be computed."""

    def __init__(self) -> None:
        self.asleep: tuple[Memory, ...] = ()
        self.missing: frozenset[str] = frozenset()  # weights to load before requests can run
        self.is_updating = False
        self.has_changed = False  # whether the open update has changed a weight
        self.loaded_tied: set[str] = set()  # the tied tensors that it has loaded
        self._why_missing = ""

    @property
    def refusal(self) -> NotReadyError | None:
        """Why requests are refused, if they are."""
        if self.asleep:
            freed = " and ".join(self.asleep)
            verb = "is" if freed == "kv_cache" else "are"
            return AsleepError(f"this LLM sleeps ({freed} {verb} freed); call wake_up() first")
        if self.is_updating:
            return NotReadyError(
                "an update of the weights is open; end_update() or cancel_update() ends it"
            )
        return None if self._lack is None else NotReadyError(self._lack)

    @property
    def _lack(self) -> str | None:
        return f"{self._why_missing}; {WAY_OUT}" if self.missing else None

    def check_awake(self, call: str) -> None:
        """Raise if the weights have no memory."""
        if "weights" in self.asleep:
            raise AsleepError(f'{call} needs the weights; call wake_up(tags=["weights"]) first')

    def check_closed(self, call: str) -> None:
        """Raise if an update is open."""
        if self.is_updating:
            raise NotReadyError(
                f"{call} while an update of the weights is open: call end_update() or"
                " cancel_update() first"
            )

    def check_open(self, call: str) -> None:
        """Raise if no update is open."""
        self.check_awake(call)
        if not self.is_updating:
            raise NotReadyError("no update is open; call begin_update() first")

    def check_whole(self) -> None:
        """Raise if weights are missing."""
        if self._lack is not None:
            raise NotReadyError(self._lack)

    def check_can_sleep(self, level: int) -> None:
        """Raise if the engine sleeps, or if its weights are not complete and must be kept."""
        if self.asleep:
            raise AsleepError("this LLM sleeps already")
        self.check_closed("sleep")
        if self.missing and level == 1:
            raise NotReadyError(f"{self._lack}, or sleep with level=2")

    def begin(self) -> None:
        """Record that an update begins."""
        self.is_updating, self.has_changed = True, False
        self.loaded_tied.clear()

    def end(self) -> None:
        """Record the end of the update; missing weights that it has not loaded stay missing."""
        self.is_updating = False

    def give_up(self, parts: Iterable[str]) -> None:
        """The update has failed: if it has changed a weight, all `parts` must be loaded."""
        self.is_updating = False
        if self.has_changed:
            self.missing, self._why_missing = frozenset(parts), TORN

    def fall_asleep(self, memories: tuple[Memory, ...], dropped: Iterable[str]) -> None:
        """Record that memory is freed, and that the weights `dropped` are lost."""
        self.asleep = memories
        if lost := frozenset(dropped):
            self.missing, self._why_missing = lost, DROPPED
