"""The usual names of the tensors of hybrid models in GGUF files, within a layer."""

from collections.abc import Mapping

SHORT_CONV = {
    "shortconv.in_proj.weight": "conv.in_proj.weight", "shortconv.conv.weight": "conv.conv.weight",
    "shortconv.out_proj.weight": "conv.out_proj.weight",
}  # fmt: skip
HYBRID_LAYERS: Mapping[str, Mapping[str, str]] = {
    "lfm2": SHORT_CONV,
    "lfm2moe": {**SHORT_CONV, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
}
