"""The fields of Gemma's families, which GGUF files leave out in part."""

from collections.abc import Callable

from nanovllm.models.gguf.metadata import Metadata
from nanovllm.models.gguf.usual_fields import Config, window

# The layers of the sizes whose scores are divided by the root of hidden size / heads; of the other
# sizes it is the head's size. Files do not say it.
WIDE = {"gemma2": 46, "gemma3": 62}
GELU = "gelu_pytorch_tanh"


def _gemma(metadata: Metadata) -> Config:
    metadata.only("attention.sliding_window", (0,))
    return {"hidden_act": GELU}


def _gemma2(metadata: Metadata) -> Config:
    """Old files leave out the caps, which are the published ones."""
    return {
        **_sandwich(metadata),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata) -> Config:
    return {
        **_sandwich(metadata),
        "model_type": "gemma3_text",
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", None),
    }


def _sandwich(metadata: Metadata) -> Config:
    scalar: float = metadata.size("attention.key_length")
    if metadata.size("block_count") == WIDE[metadata.architecture]:
        scalar = metadata.size("embedding_length") / metadata.number_of_heads()
    return {
        "hidden_act": GELU,
        "hidden_activation": GELU,
        "query_pre_attn_scalar": scalar,
        "sliding_window": window(metadata),
    }


GEMMA: dict[str, Callable[[Metadata], Config]] = {
    "gemma": _gemma, "gemma2": _gemma2, "gemma3": _gemma3,
}  # fmt: skip
