"""DraftSource: a draft model that was found and checked, and that ranks can load."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.drafting.draft_model import DraftModelGuesser
from nanovllm.drafting.guesser import NgramSource
from nanovllm.drafting.head_source import find_head
from nanovllm.engine.requests.tokenizer import load_tokenizer
from nanovllm.engine.start.load import load_part
from nanovllm.engine.start.parts import DraftingSource
from nanovllm.engine.start.placement import Placement, resolve_placement
from nanovllm.layers.cache_spec import TokenCache
from nanovllm.models.checkpoint import resolve_model
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.speculative_config import errors_name_model
from nanovllm.utils.checks import shorten


@dataclass(frozen=True)
class DraftSource:
    """Loads a rank's part of the draft model.

    The options are those of the engine, except what `speculative_config` says.
    """

    config: Config
    model_config: ModelConfig
    path: Path
    vocab_size: int  # of the large model

    def load(self, config: Config, model: CausalLM, placement: Placement) -> DraftModelGuesser:
        """Load this rank's part, for a model with this placement and the settled `config`.

        Both models have KV blocks of the same size.
        """
        del model
        assert self.config.max_model_len is not None
        own = replace(
            self.config, device=config.device, kvcache_block_size=placement.block_size,
            max_model_len=min(self.config.max_model_len, placement.max_positions),
        )  # fmt: skip
        with errors_name_model(f"draft model {self.config.model!r}"):
            placement = resolve_placement(own, self.model_config, placement.ranks)
            draft = load_part(own, self.model_config, self.path, placement)
        return DraftModelGuesser(draft, self.model_config, placement, self.vocab_size)


def find_source(config: Config, model_config: ModelConfig, tokenizer: Any) -> DraftingSource | None:
    """The source of drafts on the device, if the options ask for one: n-grams, a model or a head.

    A model that does not fit is an error.
    """
    asked = config.speculative_config
    if asked is None:
        return None
    if asked.method == "ngram":
        return NgramSource(asked.prompt_lookup_min, asked.prompt_lookup_max)
    if asked.method == "mtp":
        from nanovllm.drafting.mtp_source import find_mtp

        return find_mtp(config, model_config)
    if asked.model is None:
        return None
    if asked.method == "eagle3":
        return find_head(config, model_config)
    with errors_name_model(f"draft model {asked.model!r}"):
        path = resolve_model(
            asked.model, revision=asked.revision, download_dir=config.download_dir,
            quantization=asked.quantization,
        )  # fmt: skip
        draft = ModelConfig.from_dir(path, asked.quantization)
        _check_layers(draft)
        by_experts = config.enable_expert_parallel and any(layer.experts for layer in draft.layers)
        draft.check_parallel_size(config.tensor_parallel_size, by_experts)
        if config.load_format != "dummy":  # random weights generate no text to read
            _check_vocabularies(model_config, draft, tokenizer, path)
        own = replace(
            config, model=asked.model, quantization=asked.quantization,
            max_model_len=_longest(draft, asked.max_model_len), enable_expert_parallel=by_experts,
            speculative_config=None,
        )  # fmt: skip
    return DraftSource(own, draft, path, model_config.vocab_size)


def _check_layers(draft: ModelConfig) -> None:
    """Raise a ValueError unless all layers can share one block table."""
    caches = [cache for layer in draft.layers for cache in layer.cache.each]
    kept = (c for c in caches if isinstance(c, TokenCache) and c.num_tensors)
    heads = {(c.num_tensors, c.heads) for c in kept}
    if len(heads) > 1:
        raise ValueError("a draft model needs layers with equal numbers and sizes of heads")


def _longest(model: ModelConfig, asked: int | None) -> int:
    """The most tokens of a sequence that the draft model sees: its limit, or `asked` if less."""
    longest = model.max_context
    if asked is not None and asked > longest:
        raise ValueError(f"max_model_len must be at most {longest}, its limit, got {asked}")
    return asked or longest


def _check_vocabularies(model: ModelConfig, draft: ModelConfig, tokenizer: Any, path: Path) -> None:
    """Raise a ValueError if an id is not the same token in both vocabularies.

    Each may have ids that the other does not have, and its own padding after the last id. If a
    tokenizer is missing, the sizes must be equal.
    """
    other = None if tokenizer is None else load_tokenizer(None, path, warns=False)
    if other is None:
        if model.vocab_size != draft.vocab_size:
            raise ValueError(
                f"vocab_size must be the model's, {model.vocab_size}, where a tokenizer is missing"
                f" to compare; got {draft.vocab_size}"
            )
        return
    own, others = ({i: token for token, i in t.get_vocab().items()} for t in (tokenizer, other))
    for token_id in sorted(own.keys() & others.keys()):
        if own[token_id] != others[token_id]:
            raise ValueError(
                f"the draft model must have the model's tokenizer, but token {token_id} is"
                f" {shorten(others[token_id])}, and the model's is {shorten(own[token_id])}"
            )
