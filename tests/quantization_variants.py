"""Quantized checkpoints to load: the configs that their tools write, and which modules they mean.

Group sizes are smaller than published ones, so that small matrices have several groups.
"""

from dataclasses import replace
from typing import Any

import torch
from quantized_checkpoints import (
    Kind,
    Variant,
    as_awq,
    as_gptq,
    as_packed,
    as_packed_with_groups,
    as_powers,
    as_weight,
)

FLOAT = r"lm_head|embed_tokens|mlp\.gate$"  # what almost every published checkpoint leaves
HALF = dict(scale_dtype=torch.float16)

# Sizes at which models break: 3 heads, 1 of keys; 128 divides nothing, 64 only some
ODD: dict[str, Any] = dict(
    hidden_size=96, intermediate_size=160, num_attention_heads=3, num_key_value_heads=1, head_dim=32
)
MOE: dict[str, Any] = dict(
    family="Qwen3Moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32
)


def uniform(config: dict[str, Any], kind: Kind, skip: str = FLOAT, **more: Any) -> Variant:
    """Every linear layer is of one kind, except those whose names have a match of `skip`."""
    return Variant(config, ((skip, None), (r"_proj$|lm_head|mlp\.gate$", kind)), **more)


# quant_method "fp8"


def fp8_kind(*block: int, dtype: torch.dtype = torch.float32) -> Kind:
    store = as_weight("weight_scale_inv")
    return Kind(store, (block[0], block[1]), is_float=True, scale_dtype=dtype)


def fp8_config(block: list[int] | None, **fields: Any) -> dict[str, Any]:
    """As Qwen publishes it."""
    return dict(
        activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=block,
        modules_to_not_convert=["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    ) | fields  # fmt: skip


def fp8_tensor(scheme: str, names: list[str], shape: list[int], **config: Any) -> Variant:
    """A scale for each matrix, and with static activations one for its inputs."""
    store = as_weight(names[0], shape=shape, input_scale=names[1] if len(names) > 1 else None)
    config = dict(quant_method="fp8", activation_scheme=scheme) | config
    return uniform(config, Kind(store, (0, 0), is_float=True))


TRANSFORMERS_FP8 = dict(
    activation_scheme="dynamic", dequantize=False, expert_dtype="fp8", modules_to_convert=None,
    modules_to_not_convert=["lm_head", "gate"], quant_method="fp8", scale_fmt="float",
    weight_block_size=[32, 32],
)  # fmt: skip

FP8 = {
    "fp8, blocks of 128": uniform(fp8_config([128, 128]), fp8_kind(128, 128)),
    "fp8, small blocks": uniform(fp8_config([64, 32]), fp8_kind(64, 32, dtype=torch.bfloat16)),
    # As DeepSeek V3.1 is published, and as transformers writes it: in a byte each.
    **{
        f"fp8, powers of two{' in bytes' * in_bytes}": uniform(
            fp8_config([64, 32], scale_fmt="ue8m0"),
            Kind(as_powers(in_bytes), (64, 32), is_float=True, scale_dtype=torch.float8_e8m0fnu),
        )
        for in_bytes in (False, True)
    },
    "fp8, by transformers": uniform(TRANSFORMERS_FP8, fp8_kind(32, 32)),
    "fp8, some layers": uniform(
        fp8_config([32, 32], modules_to_not_convert=None,
                   ignored_layers=["lm_head", "model.layers.0.mlp.down_proj", "model.layers.1"]),
        fp8_kind(32, 32), skip=r"lm_head|layers\.0\.mlp\.down_proj|layers\.1\.",
    ),
    "fp8, a scale": fp8_tensor("dynamic", ["weight_scale"], [], ignored_layers=["lm_head"]),
    "fp8, static": fp8_tensor(
        "static", ["weight_scale", "input_scale"], [1], ignored_layers=["lm_head"],
        kv_cache_scheme=None,
    ),
    "fp8, static, by transformers": fp8_tensor(
        "static", ["weight_scale_inv", "activation_scale"], [], weight_block_size=None,
        modules_to_not_convert=["lm_head"],
    ),
}  # fmt: skip


# quant_method "compressed-tensors"


def args(kind: str, strategy: str, **fields: Any) -> dict[str, Any]:
    """A field of a scheme: `kind` is "float8", "int8" or "int4"."""
    return dict(
        actorder=None, block_structure=None, dynamic=False, group_size=None,
        num_bits=int(kind[-1]), observer="minmax", observer_kwargs={}, strategy=strategy,
        symmetric=True, type=kind[:-1],
    ) | fields  # fmt: skip


def dynamic_inputs(kind: str, strategy: str = "token", **fields: Any) -> dict[str, Any]:
    return args(kind, strategy, dynamic=True, observer=None, **fields)


def group(
    weights: dict[str, Any], inputs: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    scheme = dict(input_activations=inputs, output_activations=None, targets=["Linear"])
    return scheme | {"weights": weights} | fields


def ct_config(file_format: str, *groups: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """As llmcompressor writes it."""
    return dict(
        config_groups={f"group_{index}": group for index, group in enumerate(groups)},
        format=file_format, global_compression_ratio=None,
        ignore=["lm_head", "re:.*mlp.gate$"], kv_cache_scheme=None,
        quant_method="compressed-tensors", quantization_status="compressed", sparsity_config={},
        transform_config={}, version="0.12.2",
    ) | fields  # fmt: skip


FP8_CHANNEL = Kind(as_weight(), (1, 0), is_float=True)
FP8_SCHEME = (args("float8", "channel"), dynamic_inputs("float8"))
KV_SCHEME = args("float8", "tensor")
W4_GROUP = Kind(as_packed, (1, 32), bits=4)
W4_ARGS = args("int4", "group", group_size=32)


def ct_packed(kind: Kind, bits: str = "int4", **fields: Any) -> Variant:
    """Packed integers with groups of 32, or the whole row."""
    size = kind.block[1]
    weights = args(bits, "group" if size else "channel", group_size=size or None, **fields)
    return uniform(ct_config("pack-quantized", group(weights)), kind)


COMPRESSED_TENSORS = {
    "ct, fp8": uniform(
        ct_config("float-quantized", group(*FP8_SCHEME)),
        Kind(as_weight(), (1, 0), is_float=True, scale_dtype=torch.bfloat16),
    ),
    "ct, fp8, static": uniform(
        ct_config("float-quantized", group(args("float8", "tensor"), args("float8", "tensor"))),
        Kind(as_weight(shape=[1], input_scale="input_scale"), (0, 0), is_float=True),
    ),
    "ct, fp8, blocks": uniform(
        ct_config("float-quantized",
                  group(args("float8", "block", block_structure=[64, 32]),
                        dynamic_inputs("float8", "group", group_size=32))),
        Kind(as_weight(), (64, 32), is_float=True),
    ),
    "ct, fp8, float inputs": uniform(
        ct_config("naive-quantized", group(args("float8", "channel"))), FP8_CHANNEL
    ),
    "ct, int8": uniform(
        ct_config("int-quantized", group(args("int8", "channel"), dynamic_inputs("int8"))),
        Kind(as_weight(), (1, 0)),
    ),
    "ct, int8, static": uniform(
        ct_config("int-quantized", group(args("int8", "tensor"), args("int8", "tensor"))),
        Kind(as_weight(shape=[1], input_scale="input_scale"), (0, 0)),
    ),
    "ct, 4 bits": ct_packed(W4_GROUP),
    "ct, 4 bits, asymmetric": ct_packed(
        Kind(as_packed, (1, 32), bits=4, symmetric=False), symmetric=False, actorder="weight"
    ),
    "ct, 4 bits, rows": ct_packed(Kind(as_packed, (1, 0), bits=4)),
    "ct, 4 bits, asymmetric rows": ct_packed(
        Kind(as_packed, (1, 0), bits=4, symmetric=False), symmetric=False
    ),
    "ct, 4 bits, act-order": ct_packed(
        Kind(as_packed_with_groups, (1, 32), bits=4, act_order=True), actorder="group"
    ),
    "ct, 8 bits": ct_packed(Kind(as_packed, (1, 32)), "int8"),
    "ct, 8 bits, rows": ct_packed(Kind(as_packed, (1, 0)), "int8"),
    "ct, mixed": Variant(
        ct_config(
            "mixed-precision",
            group(*FP8_SCHEME, targets=["re:.*self_attn.*_proj$", "model.layers.0.mlp.down_proj"],
                  format="float-quantized"),
            group(W4_ARGS, targets=["re:.*mlp.*(gate|up|down)_proj$"], format="pack-quantized"),
            ignore=["lm_head", "re:.*mlp.gate$", "model.layers.1.self_attn.o_proj"],
        ),
        ((FLOAT, None), (r"layers\.1\.self_attn\.o_proj", None), ("self_attn", FP8_CHANNEL),
         (r"layers\.0\.mlp\.down_proj", FP8_CHANNEL), ("mlp", W4_GROUP)),
    ),
    "ct, named targets": uniform(
        ct_config("pack-quantized",
                  group(W4_ARGS, targets=[
                      "re:.*(v|k|o|gate|up)_proj", "re:.*experts", "model.layers.0.mlp.down_proj",
                      "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]),
                  ignore=["re:model.layers.1.mlp", "model.layers.0"]),
        W4_GROUP, skip=FLOAT + r"|layers\.1\.mlp",
    ),
    "ct, a part ignored": uniform(
        ct_config("pack-quantized", group(W4_ARGS),
                  ignore=["lm_head", "re:.*k_proj", "re:.*mlp.gate$", "re:.*up_proj"]),
        W4_GROUP, skip=FLOAT + "|k_proj|up_proj",
    ),
    "ct, kv scales": uniform(
        ct_config("float-quantized", group(*FP8_SCHEME), kv_cache_scheme=KV_SCHEME),
        FP8_CHANNEL, kv_scales=("k_scale", "v_scale"),
    ),
    "ct, kv scales of 2024": uniform(
        ct_config("int-quantized", group(args("int8", "channel"), dynamic_inputs("int8")),
                  kv_cache_scheme=KV_SCHEME),
        Kind(as_weight(), (1, 0)), kv_scales=("k_proj.output_scale", "v_proj.output_scale"),
    ),
    "ct, kv scales alone": Variant(
        ct_config("dense", kv_cache_scheme=KV_SCHEME, ignore=[]),
        (), kv_scales=("k_scale", "v_scale"),
    ),
}  # fmt: skip


def of_2026(variant: Variant) -> Variant:
    """The same config without the fields that newer versions omit, and with the one they add."""
    omitted = ("actorder", "block_structure", "observer", "observer_kwargs")
    groups = {
        name: {
            field: {k: v for k, v in value.items() if k not in omitted}
            if isinstance(value, dict) else value
            for field, value in scheme.items()
        }
        for name, scheme in variant.config["config_groups"].items()
    }  # fmt: skip
    changes = dict(config_groups=groups, version="0.20.0", moe_sparsity_config=None)
    return replace(variant, config=variant.config | changes)


COMPRESSED_TENSORS |= {
    f"{name}, of 2026": of_2026(COMPRESSED_TENSORS[name]) for name in ("ct, fp8", "ct, mixed")
}


# quant_method "awq"


def awq(size: int, skip: str = FLOAT, **fields: Any) -> Variant:
    config = dict(
        bits=4, group_size=size or -1, modules_to_not_convert=None, quant_method="awq",
        version="gemm", zero_point=True,
    ) | fields  # fmt: skip
    kind = Kind(as_awq, (1, size), bits=4, symmetric=False, scale_dtype=torch.float16)
    return uniform(config, kind, skip)


AWQ = {
    "awq": awq(32),
    "awq, groups of 8": awq(8),
    "awq, rows": awq(0),
    "awq, routers too": awq(32, r"lm_head|embed_tokens"),  # as AutoAWQ quantizes Qwen3-MoE
    "awq, some layers": awq(
        32, FLOAT + r"|layers\.1|down_proj", modules_to_not_convert=["down_proj", "layers.1.mlp",
        "model.layers.1.self_attn", "lm_head"],
    ),
}  # fmt: skip


# quant_method "gptq"


def gptq_config(bits: int, size: int, **fields: Any) -> dict[str, Any]:
    """As AutoGPTQ writes it, with the field that GPTQModel added for the format."""
    return dict(
        bits=bits, checkpoint_format="gptq", damp_percent=0.01, desc_act=False,
        group_size=size or -1, is_marlin_format=False, model_file_base_name=None,
        model_name_or_path=None, quant_method="gptq", static_groups=False, sym=True,
        true_sequential=True,
    ) | fields  # fmt: skip


def gptq(
    bits: int, size: int, *, g_idx: bool = True, zero_biases: bool = False, **fields: Any
) -> Variant:
    config = gptq_config(bits, size, **fields)
    store = as_gptq(less_one=config["checkpoint_format"] == "gptq", g_idx=g_idx)
    act_order = config["desc_act"] and not config["static_groups"]
    kind = Kind(
        store, (1, size), bits, symmetric=config["sym"], act_order=act_order, shared_order=True,
        **HALF,
    )  # fmt: skip
    skip = r"embed_tokens|mlp\.gate$" if config.get("lm_head") else FLOAT
    return uniform(config, kind, skip, zero_biases=zero_biases)


GPTQMODEL = dict(lm_head=False, pack_dtype="int32", meta={"quantizer": ["gptqmodel:4.0.0"]})

GPTQ = {
    "gptq": gptq(4, 32),
    "gptq, 8 bits": gptq(8, 32),
    "gptq, rows": gptq(4, 0),
    "gptq, rows of 8 bits": gptq(8, 0, desc_act=True, static_groups=True),
    "gptq, groups of 64": gptq(4, 64),
    "gptq, asymmetric": gptq(4, 32, sym=False),
    "gptq, version 2": gptq(4, 32, sym=False, checkpoint_format="gptq_v2", **GPTQMODEL),
    "gptq, version 2, 8 bits": gptq(8, 32, checkpoint_format="gptq_v2", **GPTQMODEL),
    "gptq, act-order": gptq(4, 32, desc_act=True),
    "gptq, act-order, asymmetric": gptq(8, 64, desc_act=True, sym=False),
    "gptq, static groups": gptq(4, 32, desc_act=True, static_groups=True),
    "gptq, no g_idx": gptq(4, 32, g_idx=False, **GPTQMODEL),
    "gptq, zero biases": gptq(4, 32, zero_biases=True),
    "gptq, lm_head": gptq(4, 32, **GPTQMODEL | {"lm_head": True}),
    "gptq, dynamic": Variant(
        gptq_config(4, 32, **GPTQMODEL, dynamic={
            r"-:.*layers\.0\..*down_proj": {}, r"-:.*mlp\.gate$": {},
            r"+:.*layers\.1\.self_attn": {"bits": 8, "group_size": 16},
            r".*layers\.1\.": {"group_size": -1},
        }),
        ((FLOAT, None), (r"layers\.0\..*down_proj", None),
         (r"layers\.1\.self_attn", Kind(as_gptq(), (1, 16), 8, **HALF)),
         (r"layers\.1\.", Kind(as_gptq(), (1, 0), 4, **HALF)),
         ("_proj", Kind(as_gptq(), (1, 32), 4, **HALF))),
    ),
}  # fmt: skip

VARIANTS: dict[str, Variant] = FP8 | COMPRESSED_TENSORS | AWQ | GPTQ
