"""What drafts cost on the ranks that guess them."""

import logging

from nanovllm.drafting.costs import FREE_TOKENS, Costs, GraphCosts, TokenCosts
from nanovllm.drafting.draft_model import step_bytes
from nanovllm.drafting.step_times import StepTimes
from nanovllm.engine.run.shard import Shard

MUCH = 0.6  # as the share of drafts that must be right, with one request

logger = logging.getLogger("nanovllm")


def costs_of(shard: Shard, times: StepTimes) -> Costs:
    """By the times of decode graphs, which guess, or else by the bytes that a draft reads.

    A warning if those are too many.
    """
    if times.graphs:
        return GraphCosts(times.graphs, times.catch_up)
    share = shard.guesser.num_bytes / step_bytes(shard.model_config, shard.placement)
    least = share + 1 / (FREE_TOKENS + 1)
    if least >= MUCH:
        logger.warning(
            "a step of the %s reads %.0f%% of the bytes that the model's reads: drafts pay only if"
            " more than %.0f%% of them are right, and few or none will be made otherwise",
            shard.guesser.name, 100 * share, 100 * least,
        )  # fmt: skip
    return TokenCosts(share)
