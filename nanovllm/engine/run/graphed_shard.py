"""GraphedShard: what captured graphs use of a shard, which imports them."""

from typing import TYPE_CHECKING, Protocol

from nanovllm.engine.cache.pools import CachePools
from nanovllm.engine.run.decode import Decodes
from nanovllm.engine.run.device_table import DeviceTable
from nanovllm.engine.run.draws import Draws
from nanovllm.engine.run.forward import Forward
from nanovllm.engine.run.step_part import StepPart
from nanovllm.engine.start.placement import Placement
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM

if TYPE_CHECKING:
    from nanovllm.engine.start.parts import MakeRedraws


class GraphedShard(Protocol):
    """A shard with a table. Its graphs are valid as long as the table and the caches are."""

    model_config: ModelConfig
    placement: Placement
    caches: CachePools
    forward: Forward
    table: DeviceTable
    decodes: Decodes
    draws: Draws
    parts: list[StepPart]
    marking: StepPart | None  # the part whose marks steps have, if there is one
    make_redraws: "MakeRedraws | None"
    are_loaded: bool  # whether the kernels of all steps are on the device

    @property
    def model(self) -> CausalLM:
        """The part of the model that the rank has."""
