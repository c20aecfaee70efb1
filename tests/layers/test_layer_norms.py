"""The layers of families with LayerNorm: norms, orders of files, parallel blocks, activations."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from nanovllm.formats.format import PLAIN_FORMATS
from nanovllm.layers.activations import XIELU, activation_of
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.file_order import FileOrder, HeadOrder, OrderedColumns, OrderedQKV, Transposed
from nanovllm.layers.head_layer_norm import head_layer_norms
from nanovllm.layers.layer import Build
from nanovllm.layers.layer_norm import LayerNorm, PlusOneLayerNorm
from nanovllm.layers.mixer import Mixer
from nanovllm.layers.parallel_block import ParallelBlock
from nanovllm.layers.plain_mlp import PlainMLP
from nanovllm.layers.ranks import Ranks
from nanovllm.models.learned_positions import PositionTable
from nanovllm.weights.places import places_of

pytestmark = pytest.mark.usefixtures("one_thread")

BUILD = Build(Ranks(), PLAIN_FORMATS, 16)


def test_factors_of_one_plus_weight_are_not_rounded() -> None:
    """In bfloat16, 1 + 0.001 is 1."""
    norm = PlusOneLayerNorm(4, 1e-5).bfloat16()
    norm.weight.data.fill_(0.001)
    x = torch.tensor([[1000.0, -1000.0, 3000.0, -3000.0]])
    expected = (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * norm.weight.float()[0].add(1)
    found = norm(x.bfloat16())
    torch.testing.assert_close(found, expected.bfloat16(), rtol=0, atol=0)
    norm.weight.data.zero_()
    assert not torch.equal(norm(x.bfloat16() * 1.01), found * 1.01), "the test can tell"


@pytest.mark.parametrize("bias", [True, False])
def test_the_sum_is_normed_and_kept(bias: bool) -> None:
    norm = LayerNorm(4, 1e-5, bias=bias)
    assert len([*norm.parameters()]) == 1 + bias
    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    normed, total = norm.add(x.clone(), residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, F.layer_norm(x + residual, (4,), norm.weight, norm.bias))


def test_each_head_has_its_norm_on_any_rank() -> None:
    """Of 4 query heads and 2 key heads on 2 ranks, each rank has the second half's own weights."""
    heads, weights = KeysAndValues(4, 2, 8, None), torch.randn(4, 8)
    for rank in range(2):
        queries, keys = head_layer_norms(heads, 1e-5, Ranks(rank, 2))
        for head in range(4):
            queries.weight_loader(queries.weight, weights[head], head)
        keys.weight_loader(keys.weight, weights[:2], None)
        torch.testing.assert_close(queries.weight.data, weights[2 * rank : 2 * rank + 2])
        torch.testing.assert_close(keys.weight.data, weights[rank : rank + 1])
        x = torch.randn(3, 2, 8)
        expected = F.layer_norm(x, (8,)) * queries.weight
        torch.testing.assert_close(queries(x.view(-1, 8)).view(x.shape), expected)


def test_groups_of_heads_are_sorted_by_kind() -> None:
    """Two groups of two query heads with one row: q0 q1 k0 v0 q2 q3 k1 v1."""
    order = HeadOrder(num_heads=4, num_kv_heads=2, head_dim=1)
    file = torch.arange(8)[:, None] * torch.ones(1, 3)
    assert order.view(file, None)[0:8, 0:1].flatten().tolist() == [0, 1, 4, 5, 2, 6, 3, 7]
    assert order.view(file, None)[4:6].tolist() == [[2.0] * 3, [6.0] * 3]
    assert order.view(file, 0) is file, "a file with parts has them as they are"
    assert order.outputs(torch.arange(8)).tolist() == [0, 1, 4, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("order", [HeadOrder(4, 2, 8), Transposed()])
def test_updates_copy_to_where_the_loader_does(order: FileOrder) -> None:
    """Copies to the recorded places fill a rank's weight, and restore the file's tensor."""
    pieces = []
    for rank in range(2):
        layer = OrderedQKV(order, 6, 8, 4, 2, False, Ranks(rank, 2))
        shape = layer.whole_shape(layer.weight, None)
        file = torch.arange(float(math.prod(shape))).view(shape)
        layer.weight_loader(layer.weight, file, None)
        loaded = layer.weight.data.clone()
        layer.weight.data.zero_()
        places = places_of(partial(layer.weight_loader, layer.weight, shard_id=None), shape)
        for place in places:
            place.memory.copy_(place.part(file))
        assert torch.equal(layer.weight.data, loaded)
        pieces += [(place.index, place.memory.clone()) for place in places]
    whole = torch.full_like(file, -1)
    for index, values in pieces:
        whole[index] = values
    assert torch.equal(whole, file)


def test_a_transposed_matrix_multiplies_as_the_file_says() -> None:
    layer = OrderedColumns(Transposed(), 6, [4], True)
    file, x = torch.randn(6, 4), torch.randn(2, 6)
    layer.weight_loader(layer.weight, file, None)
    assert layer.bias is not None
    layer.weight_loader(layer.bias, torch.ones(4), None)
    torch.testing.assert_close(layer(x), x @ file + 1)
    with pytest.raises(ValueError, match=r"shape \(6, 4\), the model needs \(4, 6\)"):
        layer.weight_loader(layer.weight, file.t(), None)


class Doubled(Mixer):
    """A mixer without a memory."""

    cache = KeysAndValues(1, 1, 4, None)

    def mix(self, x: torch.Tensor, ropes: object) -> torch.Tensor:
        return 2 * x

    def project(self, mixed: torch.Tensor) -> torch.Tensor:
        return mixed + 1


@pytest.mark.parametrize("own", [True, False])
def test_both_parts_of_a_parallel_block_read_its_input(own: bool) -> None:
    mlp = PlainMLP(BUILD, 4, 8, activation_of("relu2"))
    for linear in (mlp.up_proj, mlp.down_proj):
        linear.weight.data.normal_()
    first, second = LayerNorm(4, 1e-5), LayerNorm(4, 1e-5)
    second.bias.data.fill_(3)  # type: ignore[union-attr]
    norms = (("first", first), ("second", second) if own else None)
    block = ParallelBlock(BUILD, norms[0], Doubled(), mlp, norms[1])  # type: ignore[arg-type]
    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    normed, total = block.enter(x.clone(), residual)
    out, left = block(normed, total, {})
    read = (second if own else first)(total)
    torch.testing.assert_close(out, 2 * first(total) + 1 + mlp(read))
    torch.testing.assert_close(left, x + residual)
    rows = torch.tensor([2, 0])
    some, some_left = block(normed, total, {}, rows)
    torch.testing.assert_close(some, out[rows])
    torch.testing.assert_close(some_left, left[rows])


def test_xielu_is_a_parabola_and_an_exponential() -> None:
    layer = XIELU()
    layer.alpha_p.data.fill_(math.log(math.expm1(2.0)))  # softplus of it is 2
    layer.alpha_n.data.fill_(math.log(math.expm1(0.5)))
    found = layer(torch.tensor([3.0, 0.0, -1.0]))
    expected = [2 * 9 + 1.5, 0.0, (math.exp(-1) - 1 + 1) - 0.5]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_the_position_table_may_begin_with_other_rows() -> None:
    table = PositionTable(4, 2, offset=2)
    table.weight.data.copy_(torch.arange(12.0).view(6, 2))
    assert table(torch.tensor([0, 3])).tolist() == [[4.0, 5.0], [10.0, 11.0]]
