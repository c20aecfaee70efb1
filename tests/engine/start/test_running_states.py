"""The default of `max_num_seqs` in models that keep states for each sequence."""

import copy
from typing import Any

import pytest
from families.hybrids import PUBLISHED

from nanovllm.config import Config
from nanovllm.engine.start.placement import resolve_placement
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.models.config import ModelConfig

OF_SEQUENCE = 18 * (16 * 128 * 128 * 4 + 3 * 6144 * 2)  # bytes of the states of Qwen3.5-0.8B


def most_sequences(ranks: Ranks = ALONE, **options: Any) -> int | None:
    config = Config("model", device="cpu", **options)
    model_config = ModelConfig.parse(copy.deepcopy(PUBLISHED["Qwen3.5-0.8B"].file))
    return resolve_placement(config, model_config, ranks).settle(config).max_num_seqs


@pytest.mark.parametrize("drafts", [0, 3])
def test_states_take_at_most_half_of_the_memory(drafts: int) -> None:
    """As many sequences as that allows, and one where it allows none."""
    options: dict[str, Any] = dict(dtype="bfloat16")
    if drafts:
        options["speculative_config"] = dict(method="ngram", num_speculative_tokens=drafts)
    for memory in (0.5, 4.0):
        number = most_sequences(cpu_kvcache_gib=memory, **options)
        assert number == int(memory * 2**29 / (OF_SEQUENCE * (1 + drafts)))
    assert most_sequences(cpu_kvcache_gib=0.01, **options) == 1


def test_what_is_asked_for_and_the_usual_number_stay() -> None:
    assert most_sequences(cpu_kvcache_gib=0.01, max_num_seqs=40) == 40
    assert most_sequences(cpu_kvcache_gib=1000.0) == 256
