"""Which models of a shard's drafting are heads that the checkpoint of the model carries."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from nanovllm.engine.run.device_drafting import DeviceDrafting
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.parts import build_model
from nanovllm.weights.blank import carried_heads
from nanovllm.weights.named_tensors import KnownTensors


class Prefixed(CausalLM):
    """A model of a family outside of the package, which has a `prefix` for reasons of its own."""

    prefix = "model."


def test_a_draft_model_with_a_prefix_is_no_head_of_the_checkpoint(model_dir: Path) -> None:
    """All of its tensors would be left out of what an update must have."""
    config = ModelConfig.from_dir(model_dir)
    with torch.device("meta"):
        usual = build_model(config, max_positions=16)
    draft = Prefixed(usual.make, usual.model, usual.lm_head)
    drafting = DeviceDrafting()
    drafting.models = ((config, draft),)
    shard: Any = SimpleNamespace(drafting=drafting)
    assert carried_heads(shard) == []
    assert KnownTensors(draft).parts == KnownTensors(usual).parts != set()
