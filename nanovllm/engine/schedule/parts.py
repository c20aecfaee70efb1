"""What the features of a request keep for one sequence, and what the scheduler asks of it."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from nanovllm.outputs import FinishReason


class End(NamedTuple):
    """How a follower ends a sequence. With the reason "error" the last token is removed."""

    reason: FinishReason
    stop_reason: str | None = None


class Follower(Protocol):
    """Follows a sequence's tokens as they become known: a text, counts, a grammar."""

    def update(self, seq: Any) -> End | None:
        """Catch up with the known tokens of a Sequence. Returns the end found in them, if any."""

    def reset(self) -> None:
        """Drop what an interrupt may have left half done; the next `update` restores it."""


@dataclass(slots=True, eq=False)
class SequenceParts:
    """What the features of a request keep for one sequence: a part for each feature.

    The scheduler reads what the parts declare, and calls those that are followers. A part with
    `wanted` waits until the model has computed these tokens of the prompt.
    """

    text: Any = None  # a follower
    counts: Any = None  # how often each token occurs: a follower
    constraint: Any = None  # which tokens may come next: a follower
    processors: Any = None  # callables that change logits: a follower
    errors: dict[int, str] = field(default_factory=dict)  # why a token cannot be drawn, by index
    bad_words: Any = None  # what they forbid after the last tokens
    logprobs: Any = None  # with `wanted`
    keeper: Any = None  # keeps results of the model, with `wanted`; says whether to generate
    adapter: Any = None  # changes the model's weights
    pace: Any = None  # how many guesses were right lately
    samples: Any = None  # bounds how many samples of the request run
    salt: int = 0  # separates the cached prefixes of requests, as an adapter does

    @property
    def followers(self) -> tuple[Follower, ...]:
        """The parts that follow the tokens, in order: the first end that is found counts."""
        found = (self.processors, self.constraint, self.text, self.counts)
        return tuple(part for part in found if part is not None)

    @property
    def filters(self) -> bool:
        """Whether tokens or callables of the request narrow each draw."""
        return self.bad_words is not None or self.processors is not None

    @property
    def generates(self) -> bool:
        """Whether tokens are sampled."""
        return self.keeper is None or bool(self.keeper.generates)

    @property
    def root(self) -> int:
        """The root of the sequence's prefixes: equal weights and equal salts share it."""
        return self.salt - (0 if self.adapter is None else int(self.adapter.number))

    @property
    def first_wanted(self) -> list[int]:
        """The first prompt token that each waiting part waits for."""
        return [p.wanted.start for p in (self.logprobs, self.keeper) if p is not None and p.wanted]
