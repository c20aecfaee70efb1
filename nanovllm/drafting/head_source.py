"""HeadSource: an EAGLE-3 head that was found and checked, and that ranks can load."""

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nanovllm.config import Config
from nanovllm.drafting.eagle3_config import HeadConfig
from nanovllm.drafting.eagle3_files import HEAD_PATTERNS, load_head, random_head
from nanovllm.drafting.eagle3_head import Eagle3Head
from nanovllm.drafting.head_guesser import HeadGuesser
from nanovllm.drafting.placed import made_on
from nanovllm.engine.start.placement import Placement, resolve_placement
from nanovllm.models.checkpoint import resolve_model
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.speculative_config import errors_name_model
from nanovllm.utils.resources import memory_text

logger = logging.getLogger("nanovllm")


@dataclass(frozen=True)
class HeadSource:
    """Loads a rank's part of the head. `taps` are the layers of the model that the head reads."""

    name: str
    path: Path
    config: HeadConfig
    taps: tuple[int, ...]

    def load(self, config: Config, model: CausalLM, placement: Placement) -> HeadGuesser:
        """Load this rank's part, for a model with this placement, and let the model tap its layers.

        The head has the model's type, and KV blocks of the same size. Its own limit of positions is
        not used: published heads have a lower limit than their model, and other engines ignore it.
        """
        start = time.perf_counter()
        with errors_name_model(f"head {self.name!r}"):
            own = self._placed(config, placement)
            head = self._load(config, own)
            _share_embedding(head, model)
            num_bytes = head.num_bytes
            head.bind(own.backend)
        model.model.tap(self.taps)
        logger.info(
            "EAGLE-3 head, %s loaded in %.1f s; it reads the residuals before layers %s",
            memory_text(num_bytes), time.perf_counter() - start,
            ", ".join(map(str, self.taps)),
        )  # fmt: skip
        all_bytes = num_bytes * placement.ranks.size
        return HeadGuesser(head, model.model.embed_tokens, own, all_bytes)

    def _placed(self, config: Config, placement: Placement) -> Placement:
        length = placement.max_positions
        layer = replace(self.config.layer, max_position_embeddings=length)
        options = replace(config, kvcache_block_size=placement.block_size, max_model_len=length)
        return resolve_placement(options, layer, placement.ranks)

    def _load(self, config: Config, placement: Placement) -> Eagle3Head:
        with made_on(placement):
            sizes = self.config, placement.max_positions, placement.ranks
            if config.load_format == "dummy":
                return random_head(*sizes, config.seed)
            return load_head(self.path, *sizes)


def _share_embedding(head: Eagle3Head, model: CausalLM) -> None:
    """Drop the head's embedding if it is a copy of the model's, as in many files."""
    own, other = head.embed_tokens, model.model.embed_tokens
    if own is not None and other.is_plain and torch.equal(own.weight, other.weight):
        head.embed_tokens = None


def find_head(config: Config, model_config: ModelConfig) -> HeadSource:
    """The head that the options name; one that does not fit is an error."""
    asked = config.speculative_config
    assert asked is not None and asked.model is not None
    with errors_name_model(f"head {asked.model!r}"):
        path = resolve_model(
            asked.model, HEAD_PATTERNS, revision=asked.revision, download_dir=config.download_dir
        )
        head = HeadConfig.from_dir(path)
        head.layer.check_parallel_size(config.tensor_parallel_size)
        return HeadSource(asked.model, path, head, head.taps(model_config))
