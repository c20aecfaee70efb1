"""FP8 checkpoints of MiniMax-M2 and MiMo-V2, with the names and plain layers of published ones.

Their output equals that of the weights that they stand for.
"""

from pathlib import Path
from typing import Any

import pytest
from families import PUBLISHED, SAMPLES
from families.describe import write
from quantization_variants import fp8_kind
from quantized_checkpoints import DEQUANTIZED, Variant, quantize
from reference import make_llm

from nanovllm import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
# The matrices that files have plain; the config of MiMo does not name its routers.
PLAIN = {"MiniMax-M2": r"lm_head|embed|\.gate$", "MiMo-V2": r"lm_head|embed|\.gate$|o_proj"}
OF = {"MiniMax-M2": "MiniMax-M2", "MiMo-V2": "MiMo-V2-Flash"}


def tokens(path: Path, **options: Any) -> list[list[int]]:
    prompts = [[*range(40, 40 + n)] for n in (1, 19)]
    with make_llm(path, **options) as llm:
        return [out.token_ids for out in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("name", PLAIN)
def test_output_is_that_of_the_weights(name: str, block: int, tmp_path: Path) -> None:
    """Blocks of 16 rows divide no key head of MiMo's sample, as 128 rows no head of 192."""
    config = PUBLISHED[OF[name]].file["quantization_config"] | {"weight_block_size": [block] * 2}
    kinds = ((PLAIN[name], None), (r"_proj$|\.w[123]$", fp8_kind(block, block)))
    path = quantize(write(tmp_path / "model", SAMPLES[name]), Variant(config, kinds))
    assert tokens(path) == tokens(path / DEQUANTIZED)
