"""The usual names of the tensors of hybrid models, and of those with latents, in GGUF files."""

from collections.abc import Mapping

Parts = Mapping[str, str]


def _tensors(modules: Parts) -> dict[str, str]:
    """The names of weights and biases, of the names of modules."""
    return {
        f"{theirs}.{leaf}": f"{ours}.{leaf}"
        for theirs, ours in modules.items()
        for leaf in ("weight", "bias")
    }


def _space(above: str) -> dict[str, str]:
    """The names of a state space's tensors."""
    modules = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out":
               "out_proj"}  # fmt: skip
    inside = {"ssm_dt.bias": "dt_bias", "ssm_a": "A_log", "ssm_d": "D", **_tensors(modules)}
    return {theirs: f"{above}.{ours}" for theirs, ours in inside.items()}


def _gated(above: str, suffix: str = "") -> dict[str, str]:
    """The names of a gated feed-forward part's tensors."""
    return {f"ffn_{kind}{suffix}": f"{above}.{kind}_proj" for kind in ("gate", "up", "down")}


SHORT_CONV = _tensors(
    {f"shortconv.{name}": f"conv.{name}" for name in ("in_proj", "conv", "out_proj")}
)
OF_ROUTER = "e_score_correction_bias"
DELTA_ABOVE = "linear_attn"
# The tensors that one of Qwen3-Next's files holds.
SPLIT = {"ssm_ba.weight": [f"{DELTA_ABOVE}.in_proj_{rate}.weight" for rate in "ba"]}
DELTA = {
    **_tensors({
        "attn_qkv": f"{DELTA_ABOVE}.in_proj_qkv", "attn_gate": f"{DELTA_ABOVE}.in_proj_z",
        "ssm_beta": f"{DELTA_ABOVE}.in_proj_b", "ssm_alpha": f"{DELTA_ABOVE}.in_proj_a",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate", **_gated("mlp.shared_expert", "_shexp"),
    }),
    **_space(DELTA_ABOVE),
}  # fmt: skip
ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
ONE_PART = {
    **_space("mixer"),
    **_tensors({
        "attn_norm": "norm", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj",
        **{theirs: f"mixer.{ours}" for theirs, ours in ATTENTION.items()},
        "ffn_gate_inp": "mixer.gate", "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj", **_gated("mixer.shared_experts", "_shexp"),
    }),
    "exp_probs_b.bias": f"mixer.gate.{OF_ROUTER}",
}  # fmt: skip
KEYS_OF_LATENTS, VALUES_OF_LATENTS = "attn_k_b.weight", "attn_v_b.weight"
LATENT = _tensors({
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
})  # fmt: skip
HYBRID_LAYERS: Mapping[str, Parts] = {
    "lfm2": SHORT_CONV,
    "lfm2moe": {**SHORT_CONV, "exp_probs_b.bias": f"mlp.gate.{OF_ROUTER}"},
    "qwen3next": DELTA, "qwen35": DELTA, "qwen35moe": DELTA,
    "mamba2": ONE_PART, "nemotron_h": ONE_PART, "nemotron_h_moe": ONE_PART,
    "granitehybrid": {
        **_space("mamba"),
        **_tensors(_gated("mlp.shared_expert") | _gated("mlp.shared_expert", "_shexp")),
    },
    "deepseek2": {
        **LATENT, **_tensors(_gated("mlp.shared_experts", "_shexp")),
        "exp_probs_b.bias": f"mlp.gate.{OF_ROUTER}",
    },
    "minicpm3": LATENT,
    "falcon-h1": {
        **_space("mamba"), **_tensors({"ffn_norm": "pre_ff_layernorm", **_gated("feed_forward")}),
        "ffn_norm": "pre_ff_layernorm.weight",  # as the converter writes it
    },
}  # fmt: skip
# The module above the experts, where it is not the feed-forward part.
ABOVE_EXPERTS = {"nemotron_h_moe": "mixer"}
# The norm of a gated delta net has plain weights; the factors of the others are 1 + weight.
PLUS_ONE = ("qwen3next", "qwen35", "qwen35moe")
PLAIN_NORM = "ssm_norm.weight"
