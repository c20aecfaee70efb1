"""Choose an engine's drafting by its options and its device."""

import logging

from nanovllm.drafting.costs import FREE_TOKENS, Costs, GraphCosts, TokenCosts
from nanovllm.drafting.draft_model import step_bytes
from nanovllm.drafting.grammar_proposer import GrammarProposer
from nanovllm.drafting.guesser import Guesser
from nanovllm.drafting.host_drafting import HostDrafting
from nanovllm.drafting.ngram_proposer import NgramProposer
from nanovllm.drafting.table_drafting import TableDrafting
from nanovllm.engine.run.shard import Shard
from nanovllm.engine.schedule.drafting import Drafting
from nanovllm.speculative_config import MOST_FORCED, SpeculativeConfig

MUCH = 0.6  # if more than this share of drafts must be right with one request, the engine warns

logger = logging.getLogger("nanovllm")


def drafting_of(config: SpeculativeConfig, shard: Shard, *, mixes: bool) -> Drafting:
    """The drafting that the option asks for. `mixes` says whether steps mix prompts and decodes."""
    most, guesser = config.num_speculative_tokens, shard.drafting
    if isinstance(guesser, Guesser):
        costs = costs_of(guesser, shard)
        return TableDrafting(most, costs=costs, longest=guesser.longest, mixes=mixes)
    if config.method == "ngram":
        proposer = NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
        return HostDrafting(
            proposer, most, grammar=GrammarProposer(), most_forced=most_forced(shard)
        )
    return grammar_drafting(most) if config.method == "grammar" else Drafting()


def forced_drafting(shard: Shard) -> Drafting:
    """The drafting of an engine without the option: tokens that constraints force."""
    return grammar_drafting(most_forced(shard))


def grammar_drafting(most: int) -> Drafting:
    """Drafting of tokens that constraints force, up to `most` for a sequence in a step."""
    if not most:
        return Drafting()
    return HostDrafting(None, 0, grammar=GrammarProposer(), most_forced=most)


def most_forced(shard: Shard) -> int:
    """The most forced tokens of a sequence in a step, by default."""
    if not shard.backend.attention.packs_few_queries:
        return 0
    if shard.caches.slots_per_sequence:  # a sequence has slots for this many drafts
        return min(MOST_FORCED, shard.placement.most_rejected)
    return MOST_FORCED


def costs_of(guesser: Guesser, shard: Shard) -> Costs:
    """The costs by the times of decode graphs with their guesses, or by the bytes that a draft
    reads.

    Warns if a draft reads so many bytes that it seldom pays, or never.
    """
    if guesser.times.graphs:
        return GraphCosts(guesser.times.graphs, guesser.times.catch_up)
    share = guesser.num_bytes / step_bytes(shard.model_config, shard.placement)
    least = share + 1 / (FREE_TOKENS + 1)
    if least >= 1:
        logger.warning(
            "a step of the %s reads %.0f%% of the bytes that the model's reads: drafts cannot pay,"
            " even if all are right, and none will be made",
            guesser.label, 100 * share,
        )  # fmt: skip
    elif least >= MUCH:
        logger.warning(
            "a step of the %s reads %.0f%% of the bytes that the model's reads: drafts pay only if"
            " more than %.0f%% of them are right, and few or none will be made otherwise",
            guesser.label, 100 * share, 100 * least,
        )  # fmt: skip
    return TokenCosts(share)
