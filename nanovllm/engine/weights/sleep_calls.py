"""SleepCalls: the engine's calls that free the device's memory for a while."""

from nanovllm.engine.llm_engine import exclusive
from nanovllm.engine.weights.calls import Running, WeightCalls
from nanovllm.engine.weights.sleeping import MEMORIES, DropSaved, Memory, Save, Sleep, WakeUp
from nanovllm.utils.checks import as_list, check_choice, check_int


class SleepCalls(WeightCalls):
    """`sleep` and `wake_up`. What an engine lacks meanwhile is in `_weights`."""

    def sleep(self, level: int = 1, *, running: Running = "refuse") -> None:
        """Free the device's memory for others, until `wake_up`.

        Level 1 moves the weights to the host, where they already are on a CPU, and frees the KV
        pool. Level 2 drops the weights, too. Requests are refused meanwhile; those that wait go on
        afterwards. The engine needs `enable_sleep_mode=True`. If the host has no memory for the
        weights, this raises, and the engine stays awake. If freeing fails in the middle, it counts
        as asleep: `wake_up` gets back what was freed.
        """
        self.check_alive()
        check_int("level", level, 1, 2)
        if not self._asked.enable_sleep_mode:
            raise ValueError("sleep needs an engine with enable_sleep_mode=True")
        self._weights.check_can_sleep(level)
        self._check_running(running, "sleep")
        self._sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Get the memory back that `sleep` freed: "weights" or "kv_cache", or all by default.

        Weights that level 2 has dropped are loaded from the checkpoint if a call without `tags`
        gets their memory back. After `wake_up(["weights"])`, `update_weights` must provide them.
        """
        self.check_alive()
        wanted = MEMORIES if tags is None else tuple(as_list("tags", tags, "a list of tags"))
        for tag in wanted:
            check_choice("tags", tag, MEMORIES)
        memories = tuple(memory for memory in self._weights.asleep if memory in wanted)
        self._wake_up(memories)
        if tags is None and "weights" in memories and self._weights.missing:
            self.reload_weights()

    @property
    def is_sleeping(self) -> bool:
        """Whether memory is freed that `wake_up` gets back."""
        return bool(self._weights.asleep)

    def get_is_sleeping(self) -> bool:
        """`is_sleeping`, for callers of methods."""
        return self.is_sleeping

    @exclusive
    def _sleep(self, level: int) -> None:
        self._stop_all()
        self._save(level)
        self._weights.fall_asleep(MEMORIES, self._held.known.parts if level == 2 else ())
        self._settle()  # before: no adapter is compared with weights while they go
        self.model_runner.everywhere(Sleep(level))

    def _save(self, level: int) -> None:
        """Save the weights on all ranks, or on none."""
        try:
            self.model_runner.everywhere(Save(level))
        except Exception:
            if self.model_runner.failure is None:
                self.model_runner.everywhere(DropSaved())
            raise

    @exclusive
    def _wake_up(self, memories: tuple[Memory, ...]) -> None:
        if memories:
            self.model_runner.everywhere(WakeUp(memories))
            still = tuple(one for one in self._weights.asleep if one not in memories)
            self._weights.asleep = still
            self._settle()
