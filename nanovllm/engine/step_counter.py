"""StepCounter: what an engine's steps have computed, and how long they took."""

from dataclasses import dataclass

from nanovllm.engine.schedule.batch import Batch


@dataclass(slots=True)
class StepCounter:
    """Tokens computed and seconds spent, by kind of step; requests ended; cache hits."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    cache_queries: int = 0
    cache_hits: int = 0

    def add(self, batch: Batch, tokens: int, seconds: float) -> None:
        """Count one step; a mixed step's time is divided by its tokens, drafts left out."""
        decodes = batch.num_decodes
        self.drafted_tokens += batch.num_drafted
        self.accepted_tokens += batch.num_accepted
        self.decode_tokens += decodes + batch.num_accepted
        self.decode_seconds += seconds * decodes / tokens
        self.prefill_tokens += tokens - decodes
        self.prefill_seconds += seconds * (tokens - decodes) / tokens

    def tokens_per_step(self, before: "StepCounter") -> float:
        """Tokens that a sequence got in a decode step, on average since `before`."""
        tokens = self.decode_tokens - before.decode_tokens
        accepted = self.accepted_tokens - before.accepted_tokens
        return tokens / max(1, tokens - accepted)
