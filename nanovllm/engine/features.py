"""Features: what rooms outside the core add to an engine. The engine imports none of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nanovllm.config import Config
from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.graphs import Redraws
from nanovllm.engine.run.hidden_reader import HiddenReader
from nanovllm.engine.schedule.sequence import Follower
from nanovllm.kernels.table import Kernels
from nanovllm.layers.lora import AdapterRows
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.structured_outputs import StructuredOutputs

# From a draw of rows [B] with masks [B, W], the most rows, the size of the vocabulary, the device.
DrawMasked = Callable[[Computed, torch.Tensor, torch.Tensor], Computed]
MakeRedraws = Callable[[DrawMasked, int, int, torch.device], Redraws]


class Constraint(Follower, Protocol):
    """A follower that says which tokens may come next."""

    def copy(self) -> "Constraint":
        """Another one at its start."""


class Keeper(Protocol):
    """Keeps hidden states, or the log-probabilities of labels. `wanted` are prompt tokens."""

    wanted: range

    @property
    def asked(self) -> "Wanted":
        """What it was made for."""


class Wanted(Protocol):
    """What a request that generates nothing is for."""

    @property
    def labels(self) -> tuple[int, ...]: ...

    def keeper(self, num_tokens: int) -> Keeper:
        """What keeps it for a prompt of this length."""


class Constraints(Protocol):
    """Makes constraints over a model's vocabulary."""

    def constraint(
        self, asked: StructuredOutputs, eos_token_ids: Iterable[int] | None = None
    ) -> Constraint:
        """A constraint at its start; a ValueError if what is asked for is wrong."""


class SleepableMemory(Protocol):
    """Memory on a device that can be freed and regained at the same addresses."""

    def take_over(self, models: list[tuple[ModelConfig, CausalLM]]) -> None:
        """Move the weights of the models into it."""

    def pool(self, num_bytes: int) -> torch.Tensor:
        """Memory of a KV pool, zeroed."""

    def close(self) -> None:
        """Free all of it."""


class AdapterSlots(Protocol):
    """The slots for adapters in one rank's layers."""

    def rows(self, slots: torch.Tensor, kernels: Kernels) -> AdapterRows:
        """The adapters of rows with these slots, in int32; below 0: none."""

    def close(self) -> None:
        """Drop the model and the slots."""


@dataclass(frozen=True)
class ShardParts:
    """What features add to every rank's shard. Worker ranks get it, pickled, when they start.

    `drafting` loads what makes drafts on the device. `adapters` makes the slots in the layers of
    the loaded model. `memory` makes a device's memory that can be freed; None where none can.
    `redraws` makes what draws a graph's tokens again where constraints apply.
    """

    drafting: Any = None
    adapters: Callable[[Config, CausalLM], AdapterSlots] | None = None
    memory: Callable[[torch.device], SleepableMemory | None] | None = None
    redraws: MakeRedraws | None = None


NO_PARTS = ShardParts()

ALONE = "{} needs the class LLM or AsyncLLM: an LLMEngine alone has no such room"


class Features:
    """The features of an engine. These are none: the core alone.

    `LLM` has `nanovllm.features.AllFeatures`, which imports a feature's room when an option or a
    request first asks for it.
    """

    def shard_parts(
        self,
        config: Config,  # noqa: ARG002
        model_config: ModelConfig,  # noqa: ARG002
        tokenizer: Any,  # noqa: ARG002
    ) -> ShardParts:
        """What the options ask for on every rank."""
        return NO_PARTS

    def constraints(
        self,
        tokenizer: Any,  # noqa: ARG002
        vocab_size: int,  # noqa: ARG002
        eos_token_ids: Iterable[int],  # noqa: ARG002
    ) -> Constraints:
        """What makes constraints of `structured_outputs`."""
        raise ValueError(ALONE.format("structured_outputs"))

    def keeper(self, num_tokens: int, keeps_prompt: bool) -> Any:  # noqa: ARG002
        """What keeps the hidden states of generated tokens, and of a prompt of this length."""
        raise ValueError(ALONE.format("hidden_states"))

    def hidden_reader(self) -> HiddenReader:
        """What reads the hidden states of steps for keepers."""
        raise ValueError(ALONE.format("hidden states"))


NO_FEATURES = Features()
