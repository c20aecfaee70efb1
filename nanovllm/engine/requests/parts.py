"""What features add to requests: constraints, and keepers of hidden states."""

from collections.abc import Iterable
from typing import Protocol

from nanovllm.engine.schedule.parts import Follower
from nanovllm.structured_outputs import StructuredOutputs


class Constraint(Follower, Protocol):
    """A follower that says which tokens may come next."""

    def copy(self) -> "Constraint":
        """A copy, in the state before the first token."""


class Constraints(Protocol):
    """Makes constraints over a model's vocabulary."""

    def constraint(
        self, asked: StructuredOutputs, eos_token_ids: Iterable[int] | None = None
    ) -> Constraint:
        """A constraint in the state before the first token; a ValueError if `asked` is wrong."""

    def has(self, asked: StructuredOutputs) -> bool:
        """Whether this constraint is made without compiling it."""


class Keeper(Protocol):
    """Keeps hidden states, or the log-probabilities of labels. `wanted` are prompt tokens."""

    wanted: range
    generates: bool  # whether the request samples tokens, too

    @property
    def asked(self) -> "Wanted":
        """The results that it was made for."""


class Wanted(Protocol):
    """The results for which a prompt is computed by a request that generates nothing."""

    @property
    def labels(self) -> tuple[int, ...]: ...

    def keeper(self, num_tokens: int) -> Keeper:
        """Make a keeper of these results for a prompt of this length."""
