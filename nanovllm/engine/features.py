"""Features: what rooms outside the core add to an engine. The engine imports none of them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nanovllm.engine.schedule.drafting import Drafting
from nanovllm.engine.start.parts import NO_PARTS, ShardParts

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.engine.errors import NotReadyError
    from nanovllm.engine.requests.parts import Constraints
    from nanovllm.engine.run.model_runner import ModelRunner
    from nanovllm.engine.run.shard import Shard
    from nanovllm.engine.schedule.admission_filter import AdmissionFilter
    from nanovllm.engine.schedule.scheduler import Scheduler
    from nanovllm.engine.schedule.sequence import Sequence
    from nanovllm.lora_request import LoRARequest
    from nanovllm.models.config import ModelConfig

ALONE = "{} is not available in an LLMEngine alone; use LLM or AsyncLLM"


class RequestAdapters:
    """The adapters of an engine. The base class has none: a request that names one is refused."""

    admission_filter: "AdmissionFilter | None" = None  # None: every sequence may run

    def read(self, lora_request: "LoRARequest") -> Any:  # noqa: ARG002
        """Read an adapter for later requests; raises if it does not fit the model."""
        from nanovllm.lora_request import NOT_ENABLED

        raise ValueError(NOT_ENABLED)

    def named(self, name: str | None) -> "LoRARequest | None":  # noqa: ARG002
        """The adapter of `lora_modules` with this name, if there is one."""
        return None

    def failures(self) -> dict[int, Exception]:
        """Errors of adapters that could not be read, by the ids of requests that wait for them."""
        return {}

    def wait(self) -> None:
        """Wait briefly while adapters are read. Called when there is nothing else to do."""

    def reset(self) -> None:
        """Mark all slots as empty. For use after an interrupt, when nothing runs."""

    def refuse(self, reason: "NotReadyError | None") -> None:
        """Read no adapters from now on, for this reason; with None, read them again."""

    def close(self) -> None:
        """Stop reading adapters, and drop those in the host's memory."""


class Features:
    """The features of an engine. This base class has none: it is for the core alone.

    `LLM` has `nanovllm.features.AllFeatures`, which imports a feature's room when an option or a
    request first asks for it.
    """

    def shard_parts(
        self, config: "Config", model_config: "ModelConfig", tokenizer: Any
    ) -> ShardParts:
        """The parts of each rank's shard for these options; here a ValueError for a feature's."""
        del model_config, tokenizer
        for option in ("speculative_config", "enable_lora", "enable_sleep_mode"):
            if getattr(config, option):
                raise ValueError(ALONE.format(option))
        return NO_PARTS

    def drafting(self, config: "Config", shard: "Shard") -> Drafting:  # noqa: ARG002
        """The drafting of steps, by the options and rank 0's started shard."""
        return Drafting()

    def adapters(self, runner: "ModelRunner") -> RequestAdapters:  # noqa: ARG002
        """The adapters of requests."""
        return RequestAdapters()

    def constraints(
        self,
        tokenizer: Any,  # noqa: ARG002
        vocab_size: int,  # noqa: ARG002
        eos_token_ids: Iterable[int],  # noqa: ARG002
    ) -> "Constraints":
        """The maker of constraints from `structured_outputs`."""
        raise ValueError(ALONE.format("structured_outputs"))

    def keeper(self, num_tokens: int, keeps_prompt: bool) -> Any:  # noqa: ARG002
        """A keeper of the hidden states of generated tokens, and of a prompt of this length."""
        raise ValueError(ALONE.format("hidden_states"))

    def prepare(
        self, seq: "Sequence", config: "Config", scheduler: "Scheduler", runner: "ModelRunner"
    ) -> None:
        """Add to an engine the parts that this new sequence is the first to need."""


NO_FEATURES = Features()
