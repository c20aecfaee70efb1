"""Every family of models: greedy output and logits equal transformers' in every regime.

The models are those of `families`: of each family, a run has one, others with each commit. It costs
more than 20 seconds: there are many families.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import OPTIONS as WITH_ADAPTERS
from adapted import audit_slots, with_adapters
from families import PUBLISHED, SAMPLES
from families.describe import write
from families.experts import SAMPLES as EXPERTS
from families.latents import SPARSE as SPARSE_LATENTS
from families.routed import SAMPLES as ROUTED
from families.sigmoid_experts import SAMPLES as SIGMOIDS
from families.spaces import SPARSE as SPARSE_HYBRIDS
from reference import (
    HARD,
    MAX_LOGIT_ERROR,
    REGIMES,
    SMALL_POOL,
    Case,
    assert_same,
    audit_at_rest,
    check_aborts,
    check_hits,
    check_logits,
    check_samples,
    generate,
    make_case,
    make_llm,
    make_some_prompts,
)
from safetensors.torch import load_file

from nanovllm.command.info import describe
from nanovllm.formats.names import usual_name
from nanovllm.layers.ranks import Ranks
from nanovllm.models import model_size
from nanovllm.models.check import check_model
from nanovllm.models.config import ModelConfig
from nanovllm.models.file_names import names_of
from nanovllm.models.loader import checkpoint_targets, read_weights
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

SPARSE = [
    *EXPERTS,
    *ROUTED,
    *SPARSE_LATENTS,
    *SIGMOIDS,
    *SPARSE_HYBRIDS,
    *(name for name in SAMPLES if name.startswith("LFM2-MoE")),
]
# Transformers' own logits of such models in float32 differ by 1.8e-4 from those in float64.
SENSITIVE = dict.fromkeys(("Qwen3.5 whole", "Qwen3-Next partly dense"), 2e-4)
OTHERS = ("hits", "aborts", "samples")  # what else is checked


def family_of(name: str) -> str:
    """Models of a family differ in what follows a comma."""
    return name.partition(",")[0]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Filled by `case_of`: each model is made when the first test needs it."""
    return {}


@pytest.fixture
def case(name: str, cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Case:
    if name not in cases:
        path = write(tmp_path_factory.mktemp("family"), SAMPLES[name])
        cases[name] = make_case(path, make_some_prompts(), padded=SAMPLES[name].padded)
    return cases[name]


@pytest.mark.sampled(kind=family_of)
@pytest.mark.parametrize("name", SAMPLES)
def test_logits_equal_transformers(name: str, case: Case) -> None:
    check_logits(case, SENSITIVE.get(name, MAX_LOGIT_ERROR))


@pytest.mark.sampled(kind=family_of, share=0.04)
@pytest.mark.slow
@pytest.mark.parametrize("regime", [*REGIMES, *OTHERS])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_family_equals_transformers_with(name: str, regime: str, case: Case) -> None:
    if reason := SAMPLES[name].refuses.get(regime):
        pytest.skip(reason)
    if regime == "hits":
        check_hits(case, kvcache_block_size=4, max_num_batched_tokens=64)
    elif regime == "aborts":
        check_aborts(case, **SMALL_POOL, max_num_batched_tokens=32)
    elif regime == "samples":
        check_samples(case, **HARD)
    else:
        check_tokens(case, regime)


def check_tokens(case: Case, regime: str) -> None:
    with make_llm(case.path, **REGIMES[regime]) as llm:
        assert_same(generate(llm, case), case.expected)
        # Windows need fewer blocks: test_windows.py and test_cache_groups.py have smaller pools.
        has_kv = llm.model_runner.shard.caches.groups.groups  # states alone are never preempted
        if "small pool" in regime and has_kv and not any(llm.model_config.sliding_windows):
            assert llm.scheduler.num_preemptions >= 3
        audit_at_rest(llm)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options", [{}, dict(enforce_eager=True), dict(attention_backend="torch"), HARD]
)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_family_equals_transformers_on_a_device(
    name: str, options: dict[str, Any], case: Case
) -> None:
    with make_llm(case.path, device="cuda", **dict(num_kvcache_blocks=2000) | options) as llm:
        assert_same(generate(llm, case), case.expected)
        audit_at_rest(llm)


@pytest.mark.sampled(kind=family_of, share=0.15)
@pytest.mark.parametrize("name", SAMPLES)
def test_weights_are_updated_by_the_names_of_the_files(name: str, case: Case) -> None:
    """The engine starts with random weights, and then gets those of the files."""
    weights = {
        name: tensor
        for file in case.path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    with make_llm(case.path, load_format="dummy") as llm:
        llm.update_weights(weights)
        assert_same(generate(llm, case), case.expected)
        read = llm.get_weights()
        assert sum(t.numel() for t in read.values()) <= sum(t.numel() for t in weights.values())


@pytest.mark.sampled(kind=family_of, share=0.15)
@pytest.mark.parametrize("name", SAMPLES)
def test_adapters_of_all_linear_layers_equal_peft(name: str, case: Case, tmp_path: Path) -> None:
    if reason := SAMPLES[name].refuses.get("adapters"):
        pytest.skip(reason)
    adapted = with_adapters(case.path, tmp_path, 4, [SAMPLES[name].adapters])
    with make_llm(case.path, **WITH_ADAPTERS, **HARD) as llm:
        assert_same(adapted.generate(llm), adapted.expected)
        audit_slots(llm)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_config_counts_what_the_model_has(name: str, tmp_path: Path) -> None:
    """Memory, rooflines and `nanovllm info` are computed from the config."""
    config = ModelConfig.from_dir(write(tmp_path, SAMPLES[name]))
    with torch.device("meta"):
        model = build_model(config, 16)
    assert model_size.num_params(config) == sum(param.numel() for param in model.parameters())
    for ranks in (Ranks(), Ranks(0, 2)):
        config.check_parallel_size(ranks.size)
        with torch.device("meta"):
            check_model(config, build_model(config, 16, ranks), ranks)
    for tensors in read_weights(tmp_path):  # as errors name them, if files lack them
        known, names = checkpoint_targets(model), names_of(tensors.keys(), model.names)
        used = [name for name in tensors if not names.is_skipped(name)]
        assert [names.theirs(usual_name(name, names, known)) for name in used] == used
    described = describe({"model": str(tmp_path), "device": "cpu"})
    assert config.architecture in str(described)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_number_of_parameters(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name].file))
    config = ModelConfig.from_dir(tmp_path)
    with torch.device("meta"):
        model = build_model(config, 16)
    assert sum(param.numel() for param in model.parameters()) == PUBLISHED[name].num_parameters
    assert model_size.num_params(config) == PUBLISHED[name].num_parameters


@pytest.mark.sampled(kind=family_of, share=0.25)
@pytest.mark.slow
@pytest.mark.parametrize("name", SPARSE)
def test_two_ranks_with_whole_experts_equal_transformers(name: str, case: Case) -> None:
    options = dict(tensor_parallel_size=2, enable_expert_parallel=True, max_num_batched_tokens=64)
    with make_llm(case.path, **options) as llm:
        assert_same(generate(llm, case), case.expected)
        audit_at_rest(llm)
