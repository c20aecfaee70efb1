"""The steps of docs/adding_a_model.md, done to the letter."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import make_model
from reference import check_logits, make_case, make_prompts

from nanovllm.models import family as families

ROOT = Path(families.__file__).parents[1]
PAGE = Path(__file__).parents[2] / "docs" / "adding_a_model.md"
GRANITE = "GraniteForCausalLM"
FACTORS = dict(
    embedding_multiplier=3.0, logits_scaling=2.5, residual_multiplier=0.4, attention_multiplier=0.1
)

pytestmark = pytest.mark.usefixtures("one_thread")


def blocks_of_page() -> tuple[str, str]:
    """The page's file, and its call from outside of the package."""
    file, call = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return file, call


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Write the page's file, run its call, and undo both after the test."""
    monkeypatch.setitem(families.registered, GRANITE, "")  # undone after the test
    file, call = blocks_of_page()
    (tmp_path / "my_granite.py").write_text(file)
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(call, {})
    families.family_of(GRANITE)
    yield sys.modules["my_granite"]
    del sys.modules["my_granite"]


def test_the_page_has_the_familys_file_and_its_line() -> None:
    """What it shows is what runs; it is read from start to end."""
    file, _ = blocks_of_page()
    assert file == (ROOT / "models" / "granite.py").read_text(encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    line = f'"{GRANITE}": "{families.MODELS[GRANITE]}"'
    assert line in page and line in (ROOT / "models" / "families.json").read_text(encoding="utf-8")
    assert page[: page.index("## Composing a model")].count("\n") < 150


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_model_added_by_the_page_equals_transformers(
    module: Any, num_ranks: int, tmp_path: Path
) -> None:
    path = make_model(tmp_path / "model", family="Granite", **FACTORS)
    case = make_case(path, make_prompts())
    check_logits(case, max_num_batched_tokens=64, tensor_parallel_size=num_ranks)


def test_the_page_names_every_choice_that_exists() -> None:
    """Of norms, activations and parts of blocks; a name that is gone would mislead."""
    from nanovllm.formats.names import Names
    from nanovllm.layers import (
        block,
        cache_spec,
        channel_delta_net,
        embed_head,
        feed_forward,
        full_width_norm,
        gated_conv,
        gated_delta_net,
        gelu,
        head_layer_norm,
        interleaved,
        late_head_norms,
        latent,
        layer_norm,
        mixer,
        norm_places,
        one_part_block,
        output_gate,
        parallel_block,
        plain_mlp,
        plus_one_norm,
        query_growth,
        rms_norm,
        several_caches,
        short_values,
        side_by_side_block,
        sparse_mlp,
        state_space_mixer,
        weightless_norm,
    )
    from nanovllm.models import experts, parts

    table = "\n".join(re.findall(r"^\|.*\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"`(?:parts\.)?(\w+)(?:\(.*?\))?`", table))
    modules = (
        block, cache_spec, embed_head, feed_forward, full_width_norm, gated_conv,
        channel_delta_net, gated_delta_net, gelu, head_layer_norm, interleaved, late_head_norms,
        latent, layer_norm, mixer, norm_places, one_part_block, output_gate, parallel_block,
        plain_mlp, plus_one_norm, query_growth, rms_norm, several_caches, side_by_side_block,
        short_values, sparse_mlp, state_space_mixer, weightless_norm, experts, parts,
    )  # fmt: skip
    known = {name for each in modules for name in vars(each)} | {*Names.__dataclass_fields__}
    assert named - known == {"residual_scale", "qkv_proj", "gate_up_proj"}
    assert named >= {*Names.__dataclass_fields__}
    for each in (block.pre_norms, norm_places.post_norms, norm_places.sandwich_norms):
        assert each.__name__ in named
    assert plus_one_norm.PlusOneRMSNorm.__name__ in named
    assert {feed_forward.SiluAndMul.__name__, gelu.GeluTanhAndMul.__name__} <= named
