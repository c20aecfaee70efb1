"""Queries and keys in one order of sums, for any number of tokens."""

from functools import partial

from nanovllm.kernels.triton.attention import norm_rope_store as kernels

HEADS = 8  # of a program: the sums of the heads' norms follow the shape of its tile

norm_rope_store = partial(kernels.norm_rope_store, block_h=HEADS)
