"""The steps of docs/adding_a_model.md, done to the letter."""

import re
from pathlib import Path

import pytest
import transformers
from conftest import make_model
from reference import check_logits, make_case, make_prompts

from nanovllm.models import registry

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_model.md"
SEED_OSS = "SeedOssForCausalLM"

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not hasattr(transformers, SEED_OSS), reason="this transformers has no Seed-OSS"
    ),
]


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> registry.Architecture:
    """Run the page's own code, and undo it after the test."""
    monkeypatch.setattr(registry, "ARCHITECTURES", dict(registry.ARCHITECTURES))
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(block, {})
    return registry.get_architecture(SEED_OSS)


@pytest.mark.slow
@pytest.mark.parametrize(("out_bias", "num_ranks"), [(False, 1), (True, 1), (True, 2)])
def test_a_model_added_by_the_page_equals_transformers(
    entry: registry.Architecture, out_bias: bool, num_ranks: int, tmp_path: Path
) -> None:
    path = make_model(
        tmp_path, family="SeedOss", seed=2, attention_bias=True, attention_out_bias=out_bias
    )
    case = make_case(path, make_prompts())
    check_logits(case, max_num_batched_tokens=64, tensor_parallel_size=num_ranks)


def test_defaults_of_the_page_are_those_of_transformers(entry: registry.Architecture) -> None:
    theirs = transformers.SeedOssConfig()
    for name, value in entry.defaults.items():
        if name == "rope_theta":
            assert theirs.rope_parameters[name] == value
        else:
            assert getattr(theirs, name) == value, name


def test_the_page_names_every_flag() -> None:
    """And no other name."""
    rows = re.findall(r"^\|.*\| (`.*`) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set(registry.Architecture.__dataclass_fields__)
