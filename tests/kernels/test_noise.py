"""The random numbers of sampling: keys, ranges, and the one source of constants."""

import re
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

import nanovllm.kernels
from nanovllm.kernels.cpu.library import DEFINITIONS
from nanovllm.kernels.plain import noise
from nanovllm.kernels.plain.noise import noise_keys

KERNELS = Path(nanovllm.kernels.__file__).parent


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1))
@example(0, 0)
@example(2**64 - 1, 2**31 - 1)
def test_keys_are_xxh64(seed: int, num_tokens: int) -> None:
    """The kernels' keys are compared with these bit for bit, in test_read_table.py."""
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    keys = noise_keys(torch.tensor([signed]), torch.tensor([num_tokens], dtype=torch.int32))
    digest = xxhash.xxh64_intdigest(num_tokens.to_bytes(8, "little"), seed=seed)
    assert keys.tolist() == [digest - (1 << 63)]


@pytest.mark.parametrize("bit", [0, 31, 32, 62])
def test_every_part_of_a_key_counts(bit: int) -> None:
    one, other = noise.log_exponential(torch.tensor([0, 1 << bit]), torch.arange(100).int())
    assert bool((one != other).sum() > 90)


@pytest.mark.parametrize("u", [0.0, 2.0**31])
def test_all_exponential_numbers_are_finite(u: float) -> None:
    """At the ends of the hash's range, in float32."""
    number = torch.tensor(u).mul_(-noise.SHRINK).sub_(noise.SMALLEST).log1p_().neg_()
    assert 0 < float(number) < 17 and bool(number.log().isfinite())


def test_constants_are_written_in_one_file() -> None:
    """A second copy could differ, in a bit that no draw of a test depends on."""
    values = [*noise.PRIMES, noise.GOLDEN, *noise.MIXERS]
    literals = {f"{v % 2**bits:x}" for v in values for bits in (32, 64)} | {str(v) for v in values}
    found = {
        file.relative_to(KERNELS).as_posix()
        for file in KERNELS.rglob("*.*")
        if file.suffix in (".py", ".h", ".cpp")
        for literal in re.findall(r"\b(?:0x)?(\w{8,})", file.read_text(encoding="utf-8").lower())
        if literal.rstrip("ul") in literals
    }
    assert found == {"plain/noise.py"}


def test_the_compiler_gets_every_constant_exactly() -> None:
    given = dict(flag.removeprefix("-DNOISE_").split("=") for flag in DEFINITIONS)
    sources = [file.read_text(encoding="utf-8") for file in KERNELS.glob("cpu/*.h")]
    names = {name for source in sources for name in re.findall(r"\bNOISE_(\w+)", source)}
    assert names == set(given)
    assert float.fromhex(given["SHRINK"].rstrip("f")) == noise.SHRINK
    assert float.fromhex(given["SMALLEST"].rstrip("f")) == noise.SMALLEST
    for name, value in (("SHRINK", noise.SHRINK), ("SMALLEST", noise.SMALLEST)):
        assert float(torch.tensor(value, dtype=torch.float32)) == value, f"{name} is rounded"
