"""The steps of docs/adding_a_model.md, done to the letter."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from conftest import make_model
from reference import check_logits, make_case, make_prompts

from nanovllm.models import family as families
from nanovllm.models.fields import DEFAULTS

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_model.md"
SEED_OSS = "SeedOssForCausalLM"

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not hasattr(transformers, SEED_OSS), reason="this transformers has no Seed-OSS"
    ),
]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Write the page's file, run its call, and undo both after the test."""
    monkeypatch.setitem(families.registered, SEED_OSS, "")  # undone after the test
    file, call = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "seed_oss.py").write_text(file)
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(call, {})
    families.family_of(SEED_OSS)
    yield sys.modules["seed_oss"]
    del sys.modules["seed_oss"]


@pytest.mark.slow
@pytest.mark.parametrize(("out_bias", "num_ranks"), [(False, 1), (True, 1), (True, 2)])
def test_a_model_added_by_the_page_equals_transformers(
    module: Any, out_bias: bool, num_ranks: int, tmp_path: Path
) -> None:
    path = make_model(
        tmp_path / "model", family="SeedOss", seed=2, attention_bias=True,
        attention_out_bias=out_bias,
    )  # fmt: skip
    case = make_case(path, make_prompts())
    check_logits(case, max_num_batched_tokens=64, tensor_parallel_size=num_ranks)


def test_defaults_of_the_page_are_those_of_transformers(module: Any) -> None:
    theirs = transformers.SeedOssConfig()
    own = set(module.DEFAULTS)
    assert own
    for name, value in {**DEFAULTS, **module.DEFAULTS}.items():
        if name == "rope_theta":
            assert theirs.rope_parameters[name] == value
        elif name in own or (hasattr(theirs, name) and name != "layer_types"):
            assert getattr(theirs, name) == value, name


def test_the_page_names_every_choice_that_exists() -> None:
    """Of norms, activations and parts of blocks; a name that is gone would mislead."""
    from nanovllm.formats.names import Names
    from nanovllm.layers import (
        block,
        cache_spec,
        feed_forward,
        gelu,
        latent,
        layernorm,
        mixer,
        norm_places,
        plus_one_norm,
        sparse_mlp,
    )
    from nanovllm.models import experts, parts

    table = "\n".join(re.findall(r"^\|.*\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"`(?:parts\.)?(\w+)(?:\(.*?\))?`", table))
    modules = (
        block, cache_spec, feed_forward, gelu, latent, layernorm, mixer, norm_places, plus_one_norm,
        sparse_mlp, experts, parts,
    )  # fmt: skip
    known = {name for each in modules for name in vars(each)} | {*Names.__dataclass_fields__}
    assert named - known == {"residual_scale", "qkv_proj", "gate_up_proj"}
    assert named >= {*Names.__dataclass_fields__}
    for each in (block.pre_norms, norm_places.post_norms, norm_places.sandwich_norms):
        assert each.__name__ in named
    assert plus_one_norm.PlusOneRMSNorm.__name__ in named
    assert {feed_forward.SiluAndMul.__name__, gelu.GeluTanhAndMul.__name__} <= named
