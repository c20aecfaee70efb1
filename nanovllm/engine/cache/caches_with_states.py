"""CachesWithStates: the blocks and the states of sequences, for models that keep states."""

from collections import deque
from collections.abc import Callable, Iterable, Set

from nanovllm.engine.cache.caches import CacheLayout, Caches
from nanovllm.engine.cache.state_slots import StateSlots
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import Sequence


class CachesWithStates(Caches):
    """The KV blocks and the states of all sequences.

    A sequence begins with the longest prefix that has both its blocks and a checkpoint of the
    states. If no layer has blocks, checkpoints alone decide.
    """

    states: StateSlots

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        block_size: int,
        num_running: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        super().__init__(layout, num_blocks, block_size, num_running, enable_prefix_caching)
        assert layout.states is not None
        self.states = StateSlots(layout.states, num_running, self.blocks)

    def admit(
        self,
        seq: Sequence,
        in_progress: Set[int] = frozenset(),
        admits: Callable[[Sequence, int], bool] | None = None,
        waiting: deque[Sequence] | None = None,
    ) -> bool:
        """Give `seq` blocks and slots for states; if False, it has got nothing.

        False also if a prompt in progress will leave a checkpoint where `seq` can begin.
        """
        if self.states.branches.joins_later(seq) or not super().admit(seq, in_progress, admits):
            return False
        self.states.begin(seq, waiting)
        return True

    def in_progress(self, seq: Sequence) -> list[int]:
        """The hashes of the blocks after which there will be a checkpoint."""
        return self.states.hashes_in_progress(seq)

    def rewind(self, seq: Sequence, num_tokens: int) -> None:
        """Give up what `seq` has for tokens after its first `num_tokens`; none is published."""
        super().rewind(seq, num_tokens)
        self.states.rewind(seq, num_tokens)

    def fork(self, seq: Sequence, sibling: Sequence) -> bool:
        """Let `sibling` go on from what is kept of `seq`; if False, nothing has changed."""
        if not super().fork(seq, sibling):
            return False
        self.states.fork(seq, sibling)
        return True

    def plan(self, batch: Batch) -> None:
        """Plan the checkpoints and the copies of a step that is scheduled."""
        self.states.plan(batch)

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Enter the full blocks and the checkpoints of the first tokens of `seq` in the cache."""
        super().publish(seq, num_computed)
        if seq.checkpoints:
            self.states.publish(seq, num_computed)

    def accept(self, seq: Sequence, batch: Batch, start: int, end: int) -> None:
        """Enter the checkpoint that the step planned, if it computed that length of `seq`."""
        self.states.accept(seq, batch, start, end)

    def pass_by(self, seq: Sequence) -> None:
        """Publish what is computed, then free the blocks that no later token attends to."""
        self.publish(seq, min(seq.num_cached_tokens, seq.num_known_tokens))
        super().pass_by(seq)

    def release_ended(self, running: Iterable[Sequence]) -> None:
        """Free the states of sequences that end with the tokens in flight."""
        for seq in running:
            if seq.ends_in_flight:
                self.states.release(seq)

    def free(self, seq: Sequence) -> None:
        """Free all that `seq` has, and keep what steps in flight compute of its known tokens."""
        if seq.checkpoints:
            self.publish(seq, min(seq.num_cached_tokens, seq.num_known_tokens))
        self.states.free(seq)
        super().free(seq)

    def clear(self, running: Iterable[Sequence]) -> None:
        """Forget all prefixes and checkpoints. Running sequences keep what they have."""
        super().clear(running)
        self.states.clear()

    def counts(self) -> dict[str, int]:
        """How many blocks and slots there are, and are used, by their names in `EngineStats`."""
        used, checkpoints, number = self.states.counts()
        of_states = dict(
            state_slots_used=used, checkpoints_used=checkpoints, num_state_slots=number
        )
        return super().counts() | of_states
