"""DraftRunner: rank 0's driver of the draft model, on all ranks."""

import logging

from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.shard import Shard
from nanovllm.engine.speculative.costs import Costs, GraphCosts, TokenCosts
from nanovllm.engine.speculative.draft_model import DraftModelProposer
from nanovllm.engine.speculative.pace import TRIES_UP_TO
from nanovllm.models.model_size import step_weight_bytes
from nanovllm.models.weight_bytes import WeightBytes

logger = logging.getLogger("nanovllm")


class DraftRunner(ModelRunner):
    """Drives the second shard of each rank; the model's runner owns shards and workers."""

    def __init__(self, owner: ModelRunner) -> None:
        super().__init__(owner.shards, owner.config, owner.workers, index=1)

    def rewrite_tokens(self, seqs: list[Sequence]) -> None:
        """Let the next decode step read the last tokens of `seqs` from the host."""
        self.ledger.rewrite_tokens(seqs)


def _step_bytes(shard: Shard) -> float:
    """What a step of one token reads of the weights, on all ranks together."""
    sizes = WeightBytes(shard.placement.dtype.itemsize, shard.model_config.quantization)
    return step_weight_bytes(shard.model_config, sizes, rows=1)


def draft_costs(runner: ModelRunner) -> tuple[Costs, DraftModelProposer | None]:
    """What drafts cost on these ranks, and the proposer that asks their draft model, if any."""
    model, *drafts = runner.shards
    if not drafts:
        seconds = model.graph_seconds
        if seconds:
            return GraphCosts(seconds), None
        bytes_of_head = model.head.num_bytes * model.ranks.size if model.head else 0
        return _token_costs("head", bytes_of_head / _step_bytes(model)), None
    (draft,) = drafts
    proposer = DraftModelProposer(
        DraftRunner(runner),
        runner.config,
        vocab_sizes=(model.vocab_size, draft.vocab_size),
        longest=draft.placement.max_positions,
        repeats_steps=draft.placement.uses_graphs,
    )
    if model.graph_seconds:
        return GraphCosts(model.graph_seconds, draft.graph_seconds), proposer
    return _token_costs("draft model", _step_bytes(draft) / _step_bytes(model)), proposer


def _token_costs(name: str, share: float) -> TokenCosts:
    """The costs where a draft takes this `share` of a step; a warning if that is too much."""
    if share >= TRIES_UP_TO:
        logger.warning(
            "a step of the %s reads %.0f%% of the bytes that the model's reads: hardly any draft"
            " pays for itself, so few or none will be made",
            name, 100 * share,
        )  # fmt: skip
    return TokenCosts(share)
