"""LFM2: its states in chunks, after prefixes, forks, preemption and drafts; its config's fields."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import Adversary, speculate
from families.describe import write
from families.lfm2 import SAMPLES
from reference import (
    HARD,
    NUM_STEPS,
    Case,
    assert_same,
    audit_at_rest,
    check_preemptions,
    generate,
    make_case,
    make_llm,
    make_prompts,
)

from nanovllm import SamplingParams
from nanovllm.layers.gated_conv import GatedConv
from nanovllm.layers.ranks import Ranks
from nanovllm.models.config import ModelConfig
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

OTHER = "LFM2, width 5, biases, untied, other sizes"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(write(tmp_path_factory.mktemp("lfm2"), SAMPLES["LFM2-MoE"]), make_prompts())


@pytest.mark.sampled(share=0.35)
@pytest.mark.parametrize("size", [1, 7, 63])
def test_chunks_of_any_size_have_the_same_output(size: int, case: Case) -> None:
    """A state that a chunk does not hand on to the next one."""
    with make_llm(case.path, max_num_batched_tokens=size, max_num_seqs=min(size, 16)) as llm:
        assert_same(generate(llm, case), case.expected)


def test_hits_at_and_between_checkpoints(case: Case) -> None:
    """Prompts that leave a cached one anywhere: a state restored at the wrong token."""
    rng, long = random.Random(3), max(case.prompts, key=len)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    cut = [long[:n] + [rng.randrange(259) for _ in range(3)] for n in range(17, len(long), 9)]
    outputs, hits = [], set[int]()
    for cached in (False, True):
        with make_llm(
            case.path, enable_prefix_caching=cached, kvcache_block_size=4, num_kvcache_blocks=500
        ) as llm:
            llm.generate([long], params, use_tqdm=False)
            found = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in cut]
            outputs.append([out["token_ids"] for out in found])
            hits |= {out["num_cached_tokens"] for out in found}
            audit_at_rest(llm)
    assert outputs[0] == outputs[1] and len(hits) > 3


def test_forks_have_their_own_states(case: Case) -> None:
    params = [SamplingParams(temperature=0, n=3, max_tokens=NUM_STEPS, ignore_eos=True)]
    with make_llm(case.path, **HARD) as llm:
        outputs = llm.generate(case.prompts[:12], params * 12, use_tqdm=False)
        for output, tokens in zip(outputs, case.tokens, strict=False):
            assert [one.token_ids for one in output.outputs] == [tokens] * 3
        audit_at_rest(llm)


@pytest.mark.parametrize("backend", ["auto", "torch"])  # drafts of the host, and of the device
def test_wrong_drafts_leave_no_state(backend: str, case: Case) -> None:
    known = {(tuple(p), 0): t for p, t in zip(case.prompts, case.tokens, strict=True)}
    config = dict(method="ngram", num_speculative_tokens=5)
    with make_llm(case.path, speculative_config=config, attention_backend=backend, **HARD) as llm:
        speculate(llm, Adversary(11, 259, known))
        assert_same(generate(llm, case), case.expected)
        stats = llm.stats()
        assert 20 < stats.accepted_tokens < 0.9 * stats.drafted_tokens
        audit_at_rest(llm)


@pytest.mark.sampled(share=0.35)
def test_a_crowd_that_is_preempted_keeps_its_output(case: Case) -> None:
    check_preemptions(case, 5, **HARD)


def test_ranks_divide_channels(tmp_path: Path) -> None:
    """Each rank has half of the rows of each of the projection's parts, and its filters."""
    config = ModelConfig.from_dir(write(tmp_path, SAMPLES[OTHER]))
    model = build_model(config, 16, Ranks(1, 2))
    mixer: Any = model.mixers[1]
    assert isinstance(mixer, GatedConv) and mixer.cache.tensors[0].shape == (4, 24)
    whole = torch.arange(144.0)[:, None].expand(144, 48).contiguous()
    mixer.in_proj.weight_loader(mixer.in_proj.weight, whole, None)
    rows = [row for part in range(3) for row in range(48 * part + 24, 48 * part + 48)]
    assert mixer.in_proj.weight[:, 0].tolist() == rows
    filters = torch.arange(48.0)[:, None, None].expand(48, 1, 5)
    mixer.conv.weight_loader(mixer.conv.weight, filters, None)
    assert mixer.conv.weight[:, 0].tolist() == [*range(24, 48)]
    with pytest.raises(ValueError, match="hidden_size=48"):
        config.check_parallel_size(5)


FILE: dict[str, Any] = {"architectures": ["Lfm2ForCausalLM"], "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"block_ff_dim": 12_288}, 8192), ({"block_ff_dim": 6656, "intermediate_size": 1}, 4608),
        ({"intermediate_size": 10_752, "block_auto_adjust_ff_dim": False}, 10_752),
        ({"intermediate_size": 100, "block_ffn_dim_multiplier": None}, 66),
        ({"intermediate_size": 100, "block_ffn_dim_multiplier": 1.5, "block_multiple_of": 32}, 128),
    ],
)  # fmt: skip
def test_the_intermediate_size_is_adjusted(fields: dict[str, Any], size: int) -> None:
    assert ModelConfig.parse(FILE | fields).intermediate_size == size


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"layer_types": ["conv", "mamba", "conv", "conv"]}, "layer_types"),
        ({"layer_types": ["conv"]}, "num_hidden_layers=4"),
        ({"layer_types": ["conv"] * 4, "full_attn_idxs": [1]}, "full_attn_idxs"),
        ({"full_attn_idxs": [1, 4, 9]}, r"full_attn_idxs has \[4, 9\], but the layers are 0 to 3"),
        (
            {"architectures": ["Lfm2MoeForCausalLM"], "layer_types": ["conv"] * 4,
             "full_attn_idxs": [1]}, r"full_attn_idxs=\[1\] and layer_types differ",
        ),
        ({"conv_L_cache": 1}, "conv_L_cache"), ({"norm_eps": -1.0}, "norm_eps"),
        ({"block_multiple_of": 0}, "block_multiple_of"), ({"conv_bias": 1}, "conv_bias"),
    ],
)  # fmt: skip
def test_unsupported_fields_are_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        ModelConfig.parse(FILE | fields)
