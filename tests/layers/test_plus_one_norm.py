"""Norms with the factors 1 + weight: what `bind` keeps, and when it is computed again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families.describe import write
from families.gemma import SAMPLES
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.table import PLAIN
from nanovllm.layers.backend import Backend, TorchBackend
from nanovllm.layers.plus_one_norm import PlusOneAttention, PlusOneRMSNorm

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE, EPS = 80, 1e-6
OPTIONS: dict[str, Any] = dict(
    device="cpu", num_kvcache_blocks=40, max_model_len=64, enable_sleep_mode=True
)


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """All in float32, rounded once."""
    wide = x.float()
    return (wide * (wide.square().mean(1, True) + EPS).rsqrt() * (1 + weight.float())).to(x.dtype)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_are_not_rounded(dtype: torch.dtype) -> None:
    """1 + 2^-9 is 1 in bfloat16; in each set of kernels, before and after `bind`."""
    norm = PlusOneRMSNorm(SIZE, EPS).to(dtype)
    norm.weight.data.copy_(torch.randn(SIZE) * 2.0**-9)
    x, residual = torch.randn(2, 4, SIZE).to(dtype).unbind()
    wanted = expected(x, norm.weight)
    torch.testing.assert_close(norm(x), wanted)
    for kernels in (PLAIN, cpu_kernels()):
        norm.bind(Backend(TorchBackend(), kernels))
        torch.testing.assert_close(norm(x), wanted)
        normed, total = norm.add(x.clone(), residual)
        assert torch.equal(total, x + residual)
        torch.testing.assert_close(normed, expected(total, norm.weight))


def test_factors_stay_in_their_memory() -> None:
    """Decode graphs have its address."""
    norm = PlusOneRMSNorm(SIZE, EPS).bfloat16()
    norm.bind(Backend(TorchBackend(), PLAIN))
    before = norm.factors
    norm.weight.data.fill_(2.0)
    norm.refresh()
    assert norm.factors is before and bool((before == 3.0).all())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gemma"), SAMPLES["Gemma 3 capped"])


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [[*range(40, 40 + length)] for length in (3, 20)]
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def halve(model: Any) -> int:
    """Change the norms, where they are, and say how many attentions fuse theirs."""
    for module in model.modules():
        if isinstance(module, PlusOneRMSNorm):
            module.weight.mul_(torch.linspace(-2, 2, len(module.weight)))
    return sum(isinstance(module, PlusOneAttention) for module in model.modules())


def test_factors_follow_every_change_of_weights(model: Path) -> None:
    """A function of the caller's, an update, and a sleep that frees the weights."""
    weights = load_file(model / "model.safetensors")
    with LLM(str(model), **OPTIONS) as llm:
        first = answers(llm)
        assert llm.apply_model(halve) == [2]
        assert answers(llm) != first
        llm.update_weights(weights)
        assert answers(llm) == first
        llm.sleep(level=2)
        llm.wake_up()
        llm.reload_weights()
        assert answers(llm) == first
