"""Norms of a block at other places than before each part: after it, or both."""

from nanovllm.layers.block import Norms
from nanovllm.layers.rms_norm import RMSNorm


def post_norms(mixer: RMSNorm, feed_forward: RMSNorm) -> Norms:
    """Norms after each part, by the names of OLMo 2."""
    return Norms(
        after_mixer=("post_attention_layernorm", mixer),
        after_feed_forward=("post_feedforward_layernorm", feed_forward),
    )


def sandwich_norms(
    before_mixer: RMSNorm, after_mixer: RMSNorm, before: RMSNorm, after: RMSNorm
) -> Norms:
    """Norms before and after each part, by the names of Gemma.

    `before` and `after` are the norms of the feed-forward part.
    """
    return Norms(
        ("input_layernorm", before_mixer), ("post_attention_layernorm", after_mixer),
        ("pre_feedforward_layernorm", before), ("post_feedforward_layernorm", after),
    )  # fmt: skip
