"""SleepMode: an engine frees the device's memory for a while."""

from nanovllm.engine.exclusive import exclusive
from nanovllm.utils.checks import as_list, check_choice, check_int
from nanovllm.weights.sleeping import MEMORIES, DropSaved, Memory, Save, Sleep, WakeUp
from nanovllm.weights.weights import Running, Weights


class SleepMode:
    """`sleep` and `wake_up`. The state of the weights records what is missing meanwhile."""

    def __init__(self, weights: Weights) -> None:
        self.engine, self.weights = weights.engine, weights

    def sleep(self, level: int = 1, *, running: Running = "refuse") -> None:
        """Free the device's memory: see `LLM.sleep`.

        If freeing fails in the middle, the engine counts as asleep: `wake_up` restores what was
        freed.
        """
        self.engine.check_alive()
        check_int("level", level, 1, 2)
        if not self.engine.asked.enable_sleep_mode:
            raise ValueError("sleep needs an engine with enable_sleep_mode=True")
        self.weights.state.check_can_sleep(level)
        self.weights.check_running(running, "sleep")
        self._sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Get the memory back that `sleep` freed: see `LLM.wake_up`."""
        self.engine.check_alive()
        wanted = MEMORIES if tags is None else tuple(as_list("tags", tags, "a list of tags"))
        for tag in wanted:
            check_choice("tags", tag, MEMORIES)
        memories = tuple(memory for memory in self.weights.state.asleep if memory in wanted)
        self._wake_up(memories)
        if tags is None and "weights" in memories and self.weights.state.missing:
            self.weights.reload_weights()

    @property
    def is_sleeping(self) -> bool:
        """Whether memory is freed that `wake_up` restores."""
        return bool(self.weights.state.asleep)

    @exclusive
    def _sleep(self, level: int) -> None:
        self.weights.stop_all()
        self._save(level)
        dropped = self.weights.held.known.parts if level == 2 else ()
        self.weights.state.fall_asleep(MEMORIES, dropped)
        self.weights.settle()  # first, so that no adapter is compared with weights that are freed
        self.engine.model_runner.everywhere(Sleep(level))

    def _save(self, level: int) -> None:
        """Save the weights on all ranks, or on none."""
        try:
            self.engine.model_runner.everywhere(Save(level))
        except Exception:
            if self.engine.model_runner.failure is None:
                self.engine.model_runner.everywhere(DropSaved())
            raise

    @exclusive
    def _wake_up(self, memories: tuple[Memory, ...]) -> None:
        if memories:
            self.engine.model_runner.everywhere(WakeUp(memories))
            still = tuple(one for one in self.weights.state.asleep if one not in memories)
            self.weights.state.asleep = still
            self.weights.settle()
