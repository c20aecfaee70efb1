"""The text of Mistral Small 3.1 and of Ministral 3, inside of models that also see."""

from typing import Any

from conftest import SHAPE

from families.dense import GROWING
from families.dense_published import MINISTRAL
from families.describe import Published, Sample

CLASS = "Mistral3ForConditionalGeneration"
PIXTRAL = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
    image_size=28, patch_size=14, model_type="pixtral",
)  # fmt: skip


def whole(tied: bool, **text: Any) -> Sample:
    """The fields of `SHAPE` belong to the text; whether the tables are tied does not."""
    fields = dict(text_config=SHAPE | text, vision_config=PIXTRAL, tie_word_embeddings=tied)
    return Sample(CLASS, dict.fromkeys(SHAPE) | fields)


SAMPLES = {
    "Mistral 3 whole": whole(False, model_type="mistral", sliding_window=None, head_dim=24),
    "Mistral 3 whole, growing, tied": whole(
        True, model_type="ministral3", rope_parameters=GROWING, hidden_size=72
    ),
}


def published(num_parameters: int, text: dict[str, Any], **whole: Any) -> Published:
    file = dict(architectures=[CLASS], model_type="mistral3", text_config=text, **whole)
    return Published(file, num_parameters)


def ministral(hidden: int, layers: int, inner: int, tied: bool) -> dict[str, Any]:
    return dict(
        MINISTRAL, model_type="ministral3", hidden_size=hidden, num_hidden_layers=layers,
        intermediate_size=inner, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=131_072, hidden_act="silu", tie_word_embeddings=tied,
    )  # fmt: skip


PUBLISHED = {
    "Mistral-Small-3.1-24B": published(
        23_572_403_200,
        dict(
            attention_dropout=0.0, head_dim=128, hidden_act="silu", hidden_size=5120,
            initializer_range=0.02, intermediate_size=32_768, max_position_embeddings=131_072,
            model_type="mistral", num_attention_heads=32, num_hidden_layers=40,
            num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e9, sliding_window=None,
            use_cache=True, vocab_size=131_072,
        ),
        torch_dtype="bfloat16", spatial_merge_size=2, image_token_index=10,
    ),
    "Ministral-3-3B whole": published(3_429_006_336, ministral(3072, 26, 9216, tied=True)),
    "Ministral-3-14B whole": published(13_506_073_600, ministral(5120, 40, 16_384, tied=False)),
}  # fmt: skip
