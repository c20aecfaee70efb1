"""The forms of blocks: where norms are, what is scaled, and which rows are computed."""

import math
from typing import Any

import pytest
import torch
from thread_ranks import on_ranks

from nanovllm.formats.format import PLAIN_FORMATS
from nanovllm.kernels.table import PLAIN
from nanovllm.layers.backend import Backend, TorchBackend
from nanovllm.layers.block import Block, Norms, pre_norms
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.feed_forward import MLP, FeedForward
from nanovllm.layers.few_rows_forms import operands_of
from nanovllm.layers.layer import Build, Layer
from nanovllm.layers.mixer import Mixer, SelfAttention
from nanovllm.layers.norm_places import post_norms, sandwich_norms
from nanovllm.layers.plus_one_norm import PlusOneRMSNorm
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.models.decoder import Decoder

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN, EPS, VOCAB = 8, 1e-5, 11
IDS = torch.tensor([3, 1, 4, 1, 5])


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Part(Mixer, FeedForward):
    """A matrix; each rank computes with a part of the inputs."""

    def __init__(self, seed: int, ranks: Ranks) -> None:
        super().__init__()
        self.columns = ranks.equal_slice(HIDDEN)
        self.matrix = random(seed, HIDDEN, HIDDEN)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        return x[:, self.columns] @ self.matrix[:, self.columns].T

    def mix(self, x: Any, ropes: Any) -> torch.Tensor:
        return x

    project = forward


def norm_of(kind: type[RMSNorm], seed: int) -> RMSNorm:
    norm = kind(HIDDEN, EPS)
    norm.weight.data.copy_(random(seed, HIDDEN))
    return norm


def normed(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    factors = norm.weight + (1 if isinstance(norm, PlusOneRMSNorm) else 0)
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * factors


FORMS: dict[str, tuple[Any, int]] = {
    "pre": (pre_norms, 2), "post": (post_norms, 2), "sandwich": (sandwich_norms, 4),
}  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("kind", [RMSNorm, PlusOneRMSNorm])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_what_its_formula_says(
    form: str, kind: type[RMSNorm], scale: float, num_ranks: int
) -> None:
    """Three layers, of which the last one computes two of the rows; taps see the residuals."""
    make_norms, number = FORMS[form]
    rows, table = torch.tensor([4, 0]), random(1, VOCAB, HIDDEN)

    def run(ranks: Ranks) -> tuple[Any, ...]:
        make = Build(ranks, PLAIN_FORMATS, 16)
        blocks = []
        for index in range(3):
            norms = make_norms(*(norm_of(kind, 10 * index + i) for i in range(number)))
            parts = Part(100 + index, ranks), Part(200 + index, ranks)
            blocks.append(Block(make, norms, *parts, residual_scale=scale))
        embedding = VocabParallelEmbedding(VOCAB, HIDDEN, ranks, scale=math.sqrt(HIDDEN))
        shard = embedding.shard
        embedding.weight.data.zero_()
        embedding.weight.data[: shard.stop - shard.start] = table[shard.start : shard.stop]
        decoder = Decoder(make, embedding, blocks, norm_of(kind, 77), {})
        decoder.taps = (2, 0)
        return *decoder(IDS, torch.arange(5), rows), blocks, decoder.norm

    def expected(blocks: list[Any], last: RMSNorm) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x, taps = table[IDS] * math.sqrt(HIDDEN), []
        for block in blocks:
            taps.append(x)
            mixer, fed, *norms = block.parts
            before_mixer, after_mixer, before, after = (
                (lambda y, n=n: y if n is None else normed(y, n)) for n in norms
            )
            x = x + scale * after_mixer(before_mixer(x) @ mixer.matrix.T)
            x = x + scale * after(before(x) @ fed.matrix.T)
        return normed(x[rows], last), [taps[2], taps[0]]

    for hidden, taps, blocks, last in on_ranks(num_ranks, run):
        wanted, wanted_taps = expected(blocks, last)
        torch.testing.assert_close(hidden, wanted, rtol=1e-4, atol=1e-4)
        for tap, wanted_tap in zip(taps, wanted_taps, strict=True):
            torch.testing.assert_close(tap, wanted_tap, rtol=1e-4, atol=1e-4)
        assert [block.parts.feed_forward.seen for block in blocks] == [[5], [5], [2]]


def test_a_block_needs_a_norm_between_its_parts() -> None:
    make = Build(ALONE, PLAIN_FORMATS, 16)
    norms = Norms(before_mixer=("input_layernorm", RMSNorm(HIDDEN, EPS)))
    with pytest.raises(ValueError, match="a norm between its mixer and its feed-forward part"):
        Block(make, norms, Part(1, ALONE), Part(2, ALONE))


def test_modules_have_the_names_that_checkpoints_give_them() -> None:
    make, norms = Build(ALONE, PLAIN_FORMATS, 16), [RMSNorm(HIDDEN, EPS) for _ in range(4)]
    names = dict(mixer_name="linear_attn", feed_forward_name="block_sparse_moe")
    block = Block(make, sandwich_norms(*norms), Part(1, ALONE), Part(2, ALONE), **names)
    assert [name for name, _ in block.named_children()] == [
        "linear_attn", "block_sparse_moe", "input_layernorm", "post_attention_layernorm",
        "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ]  # fmt: skip


def test_a_sum_that_no_norm_follows_is_refused() -> None:
    """It would never be added up over the ranks."""
    make = Build(ALONE, PLAIN_FORMATS, 16)
    blocks = [
        Block(
            make, form(RMSNorm(HIDDEN, EPS), RMSNorm(HIDDEN, EPS)), Part(1, ALONE), Part(2, ALONE)
        )
        for form in (pre_norms, post_norms)
    ]
    embedding = VocabParallelEmbedding(VOCAB, HIDDEN)
    with pytest.raises(ValueError, match="a norm must follow a block that has none at its end"):
        Decoder(make, embedding, blocks, RMSNorm(HIDDEN, EPS), {})


@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_other_parts_have_no_kernels_for_few_rows(form: str) -> None:
    make_norms, number = FORMS[form]
    norms = make_norms(*(RMSNorm(HIDDEN, EPS) for _ in range(number)))
    parts = Part(1, ALONE), Part(2, ALONE)
    assert operands_of(Block(Build(ALONE, PLAIN_FORMATS, 16), norms, *parts)) == [None]


class OtherBlock(Block):
    """A family's own, which may compute something else."""


class OtherAttention(SelfAttention):
    """The same for a mixer, around its projections."""

    def project(self, mixed: torch.Tensor) -> torch.Tensor:
        return 2 * super().project(mixed)


class OtherRope(SelfAttention):
    """This one differs between its projections, where the kernels call it."""

    def attend(self, projected: torch.Tensor, ropes: Any) -> torch.Tensor:
        return super().attend(-projected, ropes)


class OtherMLP(MLP):
    """And for a feed-forward part."""


@pytest.mark.parametrize("other", [None, OtherBlock, OtherAttention, OtherRope, OtherMLP])
def test_what_a_family_makes_of_a_part_is_not_left_out_by_kernels_for_few_rows(other: Any) -> None:
    """A subclass is of another form: it may have a gate, for example."""
    make = Build(ALONE, PLAIN_FORMATS, 16)
    norms = pre_norms(RMSNorm(HIDDEN, EPS), RMSNorm(HIDDEN, EPS))
    attention = other if other in (OtherAttention, OtherRope) else SelfAttention
    mixer = attention(make, HIDDEN, KeysAndValues(2, 1, 4))
    feed_forward = (OtherMLP if other is OtherMLP else MLP)(make, HIDDEN, 2 * HIDDEN)
    block = (OtherBlock if other is OtherBlock else Block)(make, norms, mixer, feed_forward)
    for module in block.modules():
        if isinstance(module, Layer):
            module.bind(Backend(TorchBackend(), PLAIN))
    # Four matrices, here without an arrangement for a GPU; else None in place of some.
    assert (len(operands_of(block)) == 4) == (other in (None, OtherRope))


def test_attention_with_other_soft_caps_has_kernels_of_its_own() -> None:
    make, heads = Build(ALONE, PLAIN_FORMATS, 16), KeysAndValues(2, 1, 4)
    caps = (None, None, 30.0, 50.0)
    kinds = [SelfAttention(make, HIDDEN, heads, soft_cap=cap).kind for cap in caps]
    assert kinds[0] == kinds[1] and len({*kinds}) == 3


def test_factors_of_one_plus_small_weights_keep_their_differences_in_16_bits() -> None:
    norm = PlusOneRMSNorm(HIDDEN, EPS).bfloat16()
    norm.weight.data.fill_(2.0**-9)  # 1 + this is 1 in bfloat16
    x = torch.full((1, HIDDEN), 256.0, dtype=torch.bfloat16)
    assert (x.float() * (1 + 2.0**-9)).bfloat16()[0, 0] == 256.0
    big = norm(random(3, 64, HIDDEN).bfloat16()).float()
    plain = RMSNorm(HIDDEN, EPS).bfloat16()(random(3, 64, HIDDEN).bfloat16()).float()
    assert not torch.equal(big, plain), "rounding the factors to bfloat16 would lose the weights"


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("out", [False, True])
def test_logits_are_scaled_and_capped(num_ranks: int, out: bool) -> None:
    table, x = random(4, VOCAB, HIDDEN), random(5, 6, HIDDEN)

    def run(ranks: Ranks) -> torch.Tensor:
        head = ParallelLMHead(VOCAB, HIDDEN, ranks, scale=0.5, soft_cap=3.0)
        head.weight_loader(head.get_parameter("weight"), table, None)
        result = torch.empty(6, VOCAB) if out else None
        return head(x, result) if ranks.rank == 0 else head(x)

    expected = torch.tanh(x @ table.T * 0.5 / 3.0) * 3.0
    torch.testing.assert_close(on_ranks(num_ranks, run)[0], expected)
