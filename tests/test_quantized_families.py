"""Quantized checkpoints of several families, in the layouts that are published.

Their output equals that of the weights that they stand for; test_families.py compares those with
transformers.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import SAMPLES
from families.describe import write
from quantization_variants import VARIANTS
from quantized_checkpoints import DEQUANTIZED, Variant, quantize
from reference import make_llm

from nanovllm import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = ["ct, int8", "ct, fp8", "ct, 4 bits", "fp8, static, by transformers", "awq", "gptq"]
FAMILIES = [
    "Granite, tied, with biases", "Phi-3.5-MoE", "Gemma 3", "Gemma 3 whole", "Olmo2",
    "Mistral 3 whole",
]  # fmt: skip
PLAIN = r"lm_head|embed_tokens|vision_tower|multi_modal|\.(gate|router)$"
LINEAR = r"_proj$|\.w[123]$"
# Names that the tools write for what they leave plain, by the spelling of whole models.
IGNORED = ["re:.*lm_head", "re:.*vision_tower.*", "re:.*multi_modal_projector.*", "re:.*gate$"]
EXCLUDED = ["lm_head", "vision_tower", "multi_modal_projector", "gate"]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def variant(name: str) -> Variant:
    """The format for all linear layers of the text."""
    found = VARIANTS[name]
    kind = next(kind for _, kind in found.kinds if kind is not None)
    config = dict(found.config)
    if name.startswith("ct"):
        config["ignore"] = IGNORED
    elif not name.startswith("gptq"):
        config["modules_to_not_convert"] = EXCLUDED
    return replace(found, config=config, kinds=((PLAIN, None), (LINEAR, kind)))


def tokens(path: Path, **options: Any) -> list[list[int]]:
    prompts = [[*range(40, 40 + n)] for n in (1, 19)]
    with make_llm(path, **options) as llm:
        return [out.token_ids for out in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_output_is_that_of_the_weights(name: str, format_: str, tmp_path: Path) -> None:
    path = quantize(write(tmp_path / "model", SAMPLES[name]), variant(format_))
    assert tokens(path) == tokens(path / DEQUANTIZED)


@pytest.mark.parametrize(
    "names",
    [
        ["lm_head", "model.language_model.layers.0.mlp.down_proj"],
        ["language_model.lm_head", "language_model.model.layers.0.mlp.down_proj"],
        ["lm_head", "model.layers.0.mlp.down_proj"],
    ],
)
@pytest.mark.parametrize("format_", ["ct, int8", "awq"])
def test_whole_models_name_plain_layers_in_any_layout(
    format_: str, names: list[str], tmp_path: Path
) -> None:
    """Tools write the names of the modules, of old or new transformers, not those of the files."""
    found = variant(format_)
    field = "ignore" if format_.startswith("ct") else "modules_to_not_convert"
    kinds = ((r"layers\.0\.mlp\.down_proj", None), *found.kinds)
    config = found.config | {field: ["re:.*vision_tower.*", *names]}
    path = write(tmp_path / "model", SAMPLES["Mistral 3 whole"])
    quantize(path, replace(found, config=config, kinds=kinds))
    assert tokens(path) == tokens(path / DEQUANTIZED)
