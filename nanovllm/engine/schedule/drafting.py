"""Drafting: what the scheduler asks about drafts, which are guessed tokens that a step verifies.

The base class is the core's, and guesses nothing. Its subclasses are in `nanovllm.drafting`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.engine.cache.caches import Caches
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.metrics import Metric


class Drafts(NamedTuple):
    """The drafts of a step: each sequence's `tokens`, or the `number` that the device guesses."""

    tokens: Mapping[Sequence, list[int]]
    number: int = 0


NO_DRAFTS = Drafts({})


class Drafting:
    """Plans the drafts of a step, and collects the tokens that count.

    Drafts use the budget and the blocks that a step leaves: no sequence waits for drafts. Wrong
    drafts keep no blocks.
    """

    fits_mixed_steps = True  # whether drafts lose nothing if steps mix prompts and decodes

    def plan(
        self,
        seqs: list[Sequence],  # noqa: ARG002
        prompts: list[Sequence],  # noqa: ARG002
        budget: int,  # noqa: ARG002
        caches: Caches,  # noqa: ARG002
    ) -> Drafts | None:
        """Drafts for decoding `seqs`, in a step of `budget` tokens that also computes `prompts`.

        Returns None if the step must wait until the tokens in flight are known.
        """
        return NO_DRAFTS

    def must_wait(
        self,
        batch: Batch,  # noqa: ARG002
        running: Collection[Sequence],  # noqa: ARG002
        has_prompts: Callable[[], bool],  # noqa: ARG002
        caches: Caches,  # noqa: ARG002
    ) -> bool:
        """Whether the next step can be scheduled only when the tokens of `batch` are known.

        `has_prompts` says whether that step is likely to compute prompts.
        """
        return False

    def give_back(self, running: Iterable[Sequence], caches: Caches) -> None:
        """Free the blocks that sequences keep for drafts of an earlier step."""

    def collect(
        self,
        batch: Batch,
        results: list[int],
        caches: Caches,  # noqa: ARG002
    ) -> Iterable[tuple[Sequence, int]]:
        """The tokens that count, from the `results` that the device returned for a step.

        After the last one, the blocks of wrong drafts are free.
        """
        return zip(batch.sampling_seqs, results, strict=True)

    def reset(self) -> None:
        """Drop what an interrupt may have left half done."""

    def metrics(self, model: str) -> "list[Metric]":  # noqa: ARG002
        """Metrics of the drafts, by vLLM's names."""
        return []
