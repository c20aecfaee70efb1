"""Drafts for tests: proposers that are right, wrong, or both, and a pace that always asks."""

import random
from collections.abc import Callable, Mapping

from nanovllm import LLM
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.speculative.pace import Pace
from nanovllm.engine.speculative.speculator import Speculator


class Eager(Pace):
    """As many drafts as fit, whatever became of the last ones."""

    def most(self, num_tokens: int, worth: float, limit: int) -> int:
        return max(0, limit)


class RandomProposer:
    """Random tokens, of random lengths: more than asked for at times, or none.

    For a sequence that may have few tokens they are of those.
    """

    longest = 1 << 40

    def __init__(self, seed: int, num_tokens: int) -> None:
        self.rng, self.num_tokens = random.Random(seed), num_tokens
        self.on_propose: Callable[[list[Sequence]], None] = lambda _: None

    def propose(self, seqs: list[Sequence], most: list[int]) -> list[list[int]]:
        self.on_propose(seqs)
        return [self.guess(seq, number) for seq, number in zip(seqs, most, strict=True)]

    def guess(self, seq: Sequence, most: int) -> list[int]:
        length = self.rng.choice([0, 1, most, most + 3, self.rng.randint(0, most)])
        return self.rng.choices(seq.params.allowed_token_ids or range(self.num_tokens), k=length)

    def reset(self) -> None:
        pass


class Adversary(RandomProposer):
    """Knows how sequences go on, and at times lies from some place on.

    `outputs` are known by prompt and by the sample's number. It goes on after the end of an output,
    with tokens that would come if the sequence did not stop, or with any.
    """

    def __init__(
        self, seed: int, num_tokens: int, outputs: Mapping[tuple[tuple[int, ...], int], list[int]]
    ) -> None:
        super().__init__(seed, num_tokens)
        self.outputs = outputs

    def guess(self, seq: Sequence, most: int) -> list[int]:
        guess = super().guess(seq, most)
        prompt = tuple(seq.token_ids[: seq.num_prompt_tokens])
        known = self.outputs.get((prompt, seq.index), [])[seq.num_tokens - seq.num_prompt_tokens :]
        num_right = self.rng.choice([0, len(guess), len(guess), self.rng.randint(0, len(guess))])
        right = known[:num_right]
        return right + guess[len(right) :]


def speculate(llm: LLM, proposer: RandomProposer, most_drafts: int = 5) -> Speculator:
    """Let an engine verify the proposer's drafts."""
    llm.scheduler.speculator = Speculator(proposer, most_drafts, Eager)
    return llm.scheduler.speculator
