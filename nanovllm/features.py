"""AllFeatures: imports the room of each feature when an option or a request first asks for it."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from nanovllm.engine.features import Features, RequestAdapters
from nanovllm.engine.schedule.drafting import Drafting
from nanovllm.engine.start.parts import DrawMasked, MakeStepPart, ShardParts

if TYPE_CHECKING:
    import torch

    from nanovllm.config import Config
    from nanovllm.engine.requests.parts import Constraints
    from nanovllm.engine.run.model_runner import ModelRunner
    from nanovllm.engine.run.redraws import Redraws
    from nanovllm.engine.run.shard import Shard
    from nanovllm.engine.schedule.scheduler import Scheduler
    from nanovllm.engine.schedule.sequence import Sequence
    from nanovllm.models.config import ModelConfig


class AllFeatures(Features):
    """Every feature of the package."""

    def shard_parts(
        self, config: "Config", model_config: "ModelConfig", tokenizer: Any
    ) -> ShardParts:
        """The parts of every rank's shard for these options."""
        drafting, steps, memory = None, list[MakeStepPart](), None
        if config.batch_invariant:
            from nanovllm.models.invariance import check_invariance

            check_invariance(config, model_config)
        if config.speculative_config is not None:
            from nanovllm.drafting.source import find_source

            drafting = find_source(config, model_config, tokenizer)
        if config.enable_lora:
            from nanovllm.adapters.parts import adapter_parts

            steps.append(adapter_parts)
        if config.enable_sleep_mode:
            from nanovllm.weights.sleep_memory import sleep_memory

            memory = sleep_memory
        # Graphs are captured at startup, before a request asks for constraints.
        redraws = masked_draws if has_room("structured") else None
        return ShardParts(drafting, tuple(steps), memory, redraws)

    def drafting(self, config: "Config", shard: "Shard") -> Drafting:
        """The drafting of steps, by the options and rank 0's started shard."""
        if config.speculative_config is None:
            return Drafting()
        from nanovllm.drafting.choice import drafting_of

        return drafting_of(config.speculative_config, shard, mixes=config.scheduling == "mixed")

    def adapters(self, runner: "ModelRunner") -> RequestAdapters:
        """The adapters of requests."""
        if not runner.config.enable_lora:
            return RequestAdapters()
        from nanovllm.adapters.engine_adapters import EngineAdapters

        return EngineAdapters(runner)

    def constraints(
        self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> "Constraints":
        """The maker of constraints from `structured_outputs`."""
        from nanovllm.structured.grammars import Grammars

        return Grammars(tokenizer, vocab_size, eos_token_ids)

    def keeper(self, num_tokens: int, keeps_prompt: bool) -> Any:
        """A keeper of the hidden states of generated tokens, and of a prompt of this length."""
        from nanovllm.vectors.generated_states import GeneratedStates

        return GeneratedStates(num_tokens, keeps_prompt)

    def prepare(
        self, seq: "Sequence", config: "Config", scheduler: "Scheduler", runner: "ModelRunner"
    ) -> None:
        """Add a reader of hidden states for keepers, and a drafting for forced tokens."""
        if seq.parts.keeper is not None and runner.hidden_reader is None:
            from nanovllm.vectors.hidden_states import HiddenStates

            runner.read_hidden(HiddenStates())
        says_nothing = config.speculative_config is None and type(scheduler.drafting) is Drafting
        if seq.parts.constraint is not None and says_nothing and has_room("drafting"):
            from nanovllm.drafting.choice import forced_drafting

            scheduler.draft_with(forced_drafting(runner.shard))


def has_room(name: str) -> bool:
    """Whether a feature's folder exists. Without it, everything else runs."""
    try:
        return find_spec(f"nanovllm.{name}") is not None
    except ImportError:
        return False


def masked_draws(
    draw: DrawMasked, num_rows: int, vocab_size: int, device: "torch.device"
) -> "Redraws":
    """Make the object that draws a decode graph's tokens again where constraints apply."""
    from nanovllm.structured.masked_draws import MaskedDraws

    return MaskedDraws(draw, num_rows, vocab_size, device)
