"""Features: what rooms outside the core add to an engine. The engine imports none of them."""

from collections.abc import Iterable
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.requests.adapters import RequestAdapters
from nanovllm.engine.requests.parts import Constraints
from nanovllm.engine.run.hidden_reader import HiddenReader
from nanovllm.engine.run.model_runner import ModelRunner
from nanovllm.engine.run.shard import Shard
from nanovllm.engine.schedule.drafting import Drafting
from nanovllm.engine.start.parts import NO_PARTS, ShardParts
from nanovllm.models.config import ModelConfig

ALONE = "{} needs the class LLM or AsyncLLM: an LLMEngine alone has no such room"


class Features:
    """The features of an engine. These are none: the core alone.

    `LLM` has `nanovllm.features.AllFeatures`, which imports a feature's room when an option or a
    request first asks for it.
    """

    def shard_parts(self, config: Config, model_config: ModelConfig, tokenizer: Any) -> ShardParts:
        """What the options ask for on every rank. Here a ValueError, if they ask for a feature."""
        del model_config, tokenizer
        for option in ("speculative_config", "enable_lora", "enable_sleep_mode"):
            if getattr(config, option):
                raise ValueError(ALONE.format(option))
        return NO_PARTS

    def drafting(self, config: Config, shard: Shard) -> Drafting:  # noqa: ARG002
        """How steps get drafts, by the options and rank 0's started shard."""
        return Drafting()

    def forced_drafting(self, shard: Shard) -> Drafting:  # noqa: ARG002
        """How steps get the tokens that constraints force, if the options do not say it."""
        return Drafting()

    def adapters(self, runner: ModelRunner) -> RequestAdapters:  # noqa: ARG002
        """The adapters of requests."""
        return RequestAdapters()

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
