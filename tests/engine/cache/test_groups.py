"""Cache groups and their pool: which layers share block tables, and where their blocks lie."""

import itertools

import pytest
import torch

from nanovllm.engine.cache.divide import divide
from nanovllm.engine.cache.groups import CacheGroups, are_alike, single_group
from nanovllm.engine.cache.pools import KVPool
from nanovllm.kernels.kv_layer import CODES
from nanovllm.layers.attention import Attention
from nanovllm.layers.cache_spec import KeysAndValues, TokenCache
from nanovllm.layers.latent import Latent

BLOCK_SIZE, NUM_BLOCKS, LONGEST = 4, 3, 100


def layers(*caches: TokenCache) -> list[Attention]:
    return [Attention(cache) for cache in caches]


def kinds(groups: CacheGroups) -> list[tuple[int, int | None, int]]:
    return [(len(group.layers), group.window, group.parts) for group in groups.groups]


def owners(groups: CacheGroups) -> torch.Tensor:
    """Fill each block of each tensor of all layers with a number of its own.

    A block of the pool belongs to one group, here to the group of that number.
    """
    pool = KVPool(groups, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    pool.allocate(NUM_BLOCKS)
    assert NUM_BLOCKS * pool.block_bytes == pool.cache.numel() * 4
    numbers = itertools.count(1)
    filled = []
    for block, group in enumerate(groups.groups):
        for layer in group.layers:
            for cache in {id(c): c for c in (layer.kv.k_cache, layer.kv.v_cache)}.values():
                assert cache.is_contiguous() and cache.shape[1] == BLOCK_SIZE
                part = cache[block * group.parts]
                assert not part.any(), "two tensors share memory"
                part.fill_(next(numbers))
                filled.append(part)
    for number, part in enumerate(filled, 1):
        assert (part == number).all()
    return pool.cache


def test_equal_layers_are_one_group() -> None:
    alike = layers(*[KeysAndValues(4, 2, 16)] * 3)
    groups = divide(alike, LONGEST)
    assert are_alike(alike) and groups == single_group(alike)
    assert kinds(groups) == [(3, None, 1)] and (groups.num_slots, groups.slot_size) == (6, 32)
    assert (owners(groups)[:, 0] > 0).all(), "no memory is left over"


@pytest.mark.parametrize(
    "caches",
    [
        (),
        (KeysAndValues(4, 2, 16), KeysAndValues(4, 2, 32)),
        (KeysAndValues(4, 2, 16), KeysAndValues(4, 2, 16, window=8)),
        (KeysAndValues(4, 2, 16, window=8), KeysAndValues(4, 2, 16, window=8)),
        (KeysAndValues(4, 2, 16), Latent(16, 64)),
    ],
)
def test_layers_that_differ_or_have_windows_are_divided(caches: tuple[TokenCache, ...]) -> None:
    assert not are_alike(layers(*caches))


def test_layers_with_keys_of_other_sizes_share_the_blocks() -> None:
    """A slot holds two of the smaller tensors."""
    full, local = KeysAndValues(4, 2, 32), KeysAndValues(2, 1, 32, window=8)
    groups = divide(layers(local, full, local, full), LONGEST)
    assert kinds(groups) == [(1, None, 1), (1, None, 1), (2, 8, 2)]
    assert (groups.num_slots, groups.slot_size) == (2, 64)
    cache = owners(groups)
    assert (cache[:, :3] > 0).all(), "no memory is left over"


def test_no_size_need_divide_the_other() -> None:
    wide, narrow = KeysAndValues(3, 3, 16), KeysAndValues(2, 2, 16, window=8)
    groups = divide(layers(*[wide] * 4, *[narrow] * 6), LONGEST)
    assert groups.slot_size == 96 and {(g.window, g.parts) for g in groups.groups} == {
        (None, 2), (8, 3),
    }  # fmt: skip
    owners(groups)


def test_one_layer_of_each_size_fits() -> None:
    wide, narrow = KeysAndValues(3, 3, 16), KeysAndValues(2, 2, 16)
    groups = divide(layers(wide, narrow), LONGEST)
    assert kinds(groups) == [(1, None, 2), (1, None, 3)] and groups.num_slots == 1
    owners(groups)


@pytest.mark.parametrize(
    "other", [KeysAndValues(4, 4, 16), KeysAndValues(8, 2, 32), KeysAndValues(4, 1, 64)]
)
def test_heads_that_need_another_plan_are_another_group(other: KeysAndValues) -> None:
    """Although a token takes as much memory."""
    groups = divide(layers(KeysAndValues(4, 2, 32), other), LONGEST)
    assert sorted(kinds(groups)) == [(1, None, 1)] * 2
    owners(groups)


def test_a_window_that_no_sequence_exceeds_is_none() -> None:
    groups = divide(layers(KeysAndValues(4, 2, 16), KeysAndValues(4, 2, 16, window=100)), LONGEST)
    assert kinds(groups) == [(2, None, 1)]


def test_the_first_group_reaches_as_far_as_a_draft_model() -> None:
    local = KeysAndValues(4, 2, 16, window=8)
    assert kinds(divide(layers(local, local), LONGEST, reach=30)) == [(2, 30, 1)]
    assert kinds(divide(layers(local, local), LONGEST, reach=None)) == [(2, None, 1)]


def test_codes_need_keys_of_one_shape() -> None:
    groups = divide(layers(KeysAndValues(4, 2, 32), KeysAndValues(2, 1, 32)), LONGEST)
    with pytest.raises(ValueError, match="needs layers whose keys have one shape"):
        KVPool(groups, BLOCK_SIZE, CODES, torch.device("cpu"))


def test_a_pool_of_one_group_has_equal_layers() -> None:
    with pytest.raises(AssertionError):
        single_group(layers(KeysAndValues(4, 2, 32), KeysAndValues(2, 1, 32)))


# Latents


def test_a_latent_layer_has_one_tensor() -> None:
    groups = divide(layers(*[Latent(8, 40)] * 3), LONGEST)
    assert kinds(groups) == [(3, None, 1)] and (groups.num_slots, groups.slot_size) == (3, 40)
    assert (owners(groups)[:, 0] > 0).all(), "no memory is left over"
    for layer in groups.groups[0].layers:
        assert layer.kv.value_width == 40 and layer.kv.k_cache.shape[2:] == (1, 40)


def test_one_latent_layer_takes_one_slot() -> None:
    assert divide(layers(Latent(8, 40)), LONGEST).num_slots == 1
    assert single_group(layers(Latent(8, 40))).num_slots == 1


def test_latents_and_keys_share_the_blocks() -> None:
    latents, keys = [Latent(8, 48)] * 4, [KeysAndValues(4, 1, 24, window=8)] * 4
    groups = divide(layers(*latents, *keys), LONGEST)
    assert kinds(groups) == [(4, None, 1), (4, 8, 2)] and groups.num_slots == 4
    cache = owners(groups)
    assert (cache[:, :2] > 0).all(), "no memory is left over"


def test_latents_are_not_in_a_group_of_keys_of_their_size() -> None:
    groups = divide(layers(Latent(8, 64), KeysAndValues(8, 1, 64)), LONGEST)
    assert sorted(kinds(groups)) == [(1, None, 1)] * 2 and groups.num_slots == 2
    owners(groups)


def test_a_rank_has_its_part_of_the_heads() -> None:
    """Key heads are split as far as they go, and rows not at all."""
    assert KeysAndValues(8, 4, 16, window=3).part(2) == KeysAndValues(4, 2, 16, window=3)
    assert KeysAndValues(8, 2, 16).part(4) == KeysAndValues(2, 1, 16)
    assert Latent(8, 40, window=3).part(4) == Latent(2, 40, window=3)
