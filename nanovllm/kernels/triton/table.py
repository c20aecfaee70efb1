"""The kernels in Triton: which module has which operation."""

from typing import Any

from nanovllm.kernels.table import Kernels, nothing

TRITON_PLACES = {
    "rms_norm": "triton.linear.rms_norm",
    "add_rms_norm": "triton.linear.rms_norm",
    "add_normed": "triton.linear.rms_norm",
    "silu_and_mul": "triton.linear.silu_and_mul",
    "gelu_and_mul": "triton.linear.gelu_and_mul",
    "sigmoid_and_mul": "triton.linear.sigmoid_and_mul",
    "norm_rope_store": "triton.attention.norm_rope_store",
    "latent_rows": "triton.attention.latent_rows",
    "heads_linear": "plain.heads_linear",  # cuBLAS
    "store_kvcache": "triton.attention.store_kvcache",
    "mask": "triton.sampling.mask",
    "sample": "triton.sampling.sample",
    "sample_masked": "triton.sampling.sample",
    "draw": "triton.sampling.draw",
    "experts": "triton.experts.experts",
    "adapted_experts": "triton.experts.experts",
    "biased_experts": "triton.experts.biased_experts",
    "router": "triton.experts.route:router_for",
    "choose_experts": "triton.experts.choose_experts",
    "read_table": "triton.step.read_table",
    "guess_ngrams": "triton.step.guess_ngrams",
    "guess_inputs": "triton.step.guess_inputs",
    "accept": "triton.step.accept",
    "arrange": "triton.linear.arranged",
    "arranged_linear": "triton.linear.quantized_linear:quantized_linear",
    "arrange_blocks": "triton.linear.block_planes",
    "arrange_mx_experts": "triton.experts.mx_stack",
    "block_linear": "triton.linear.block_linear",
    "block_rows": "triton.linear.block_dequantize",
    "rounding": "triton.linear.rounding:rounding_of",
    "few_rows": "triton.linear.few_rows:few_rows_for",
    "group_rows": "triton.lora.row_groups",
    "lora_down": "triton.lora.lora",
    "lora_up": "triton.lora.lora",
    "causal_conv": "triton.state.causal_conv",
    "gated_delta": "triton.state.gated_delta",
    "channel_delta": "triton.state.channel_delta",
    "state_space": "triton.state.state_space",
    "gated_norm": "triton.state.gated_norm",
    "row_sums": "plain.row_sums",
    "mix_streams": "plain.mix_streams",
    "peers": "triton.ranks.all_reduce:PeerKernels",
}


# Instead of these, if sums have one order. Kernels that fuse few rows have another one.
ORDERED_PLACES = {
    "arrange_plain": "triton.ordered.linear",
    "plain_of": "triton.ordered.linear",
    "arranged_linear": "triton.ordered.linear:ordered_linear",
    "arrange_blocks": "triton.ordered.block_linear",
    "block_linear": "triton.ordered.block_linear",
    "experts": "triton.ordered.experts",
    "adapted_experts": "triton.ordered.experts",
    "biased_experts": "triton.ordered.experts",
    "router": "triton.ordered.experts:router_for",
    "norm_rope_store": "triton.ordered.heads",
    "lora_down": "triton.ordered.experts",
    "causal_conv": "triton.ordered.states",
    "gated_norm": "triton.ordered.states",
    "gated_delta": "triton.ordered.delta",
    "channel_delta": "triton.ordered.delta",
    "state_space": "triton.ordered.space",
    "heads_linear": "triton.ordered.heads_linear",
    "lora_up": "triton.ordered.experts",
    "row_sums": "triton.ordered.row_sums",
    "mix_streams": "triton.ordered.mix_streams",
}


def triton_kernels(one_order: bool = False) -> Kernels:
    """The Triton kernels. An ImportError where Triton is not installed."""
    from nanovllm.kernels.triton.step.write_table import write_table  # callers keep it

    places = TRITON_PLACES
    absent = ["arrange_plain", "plain_of"]
    if one_order:
        places = TRITON_PLACES | ORDERED_PLACES
        absent = ["few_rows", "rounding"]
    others: dict[str, Any] = dict.fromkeys(absent, nothing)
    return Kernels(
        "Triton", places, graph_safe=True, reads_plain=True, reads_stacks=True,
        write_table=write_table, **others,
    )  # fmt: skip
