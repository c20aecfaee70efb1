"""ShardParts: what features add to every rank's shard."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from nanovllm.config import Config
from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.device_drafting import DeviceDrafting
from nanovllm.engine.run.step_part import StepPart
from nanovllm.engine.start.placement import Placement
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM

if TYPE_CHECKING:
    from nanovllm.engine.run.redraws import Redraws

# Makes `Redraws` from a draw of rows [B] with masks [B, W], the most rows, vocabulary and device.
DrawMasked = Callable[[Computed, torch.Tensor, torch.Tensor], Computed]
MakeStepPart = Callable[[Config, CausalLM, Placement], StepPart]
MakeRedraws = Callable[[DrawMasked, int, int, torch.device], "Redraws"]


class SleepableMemory(Protocol):
    """Memory on a device that can be freed and regained at the same addresses."""

    def take_over(self, models: list[tuple[ModelConfig, CausalLM]]) -> None:
        """Move the weights of the models into it."""

    def pool(self, num_bytes: int) -> torch.Tensor:
        """Memory of a KV pool, zeroed."""

    def close(self) -> None:
        """Free all of it."""


class DraftingSource(Protocol):
    """A source of drafts on the device, found and checked, which every rank loads."""

    def load(self, config: Config, model: CausalLM, placement: Placement) -> DeviceDrafting:
        """Load this rank's part, for a `model` with this placement; `config` is settled."""


@dataclass(frozen=True)
class ShardParts:
    """What features add to every rank's shard. Worker ranks get it, pickled, when they start.

    `drafting` loads a draft model, or another source. `step_parts` make the parts of steps, for the
    loaded model. `memory` makes a device's memory that can be freed; None if none can be freed.
    `redraws` makes the object that draws a graph's tokens again where constraints apply.
    """

    drafting: DraftingSource | None = None
    step_parts: tuple[MakeStepPart, ...] = ()
    memory: Callable[[torch.device], SleepableMemory | None] | None = None
    redraws: MakeRedraws | None = None


NO_PARTS = ShardParts()
