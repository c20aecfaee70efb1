"""The kernels of the CPU: which module has which operation. The others are the plain ones."""

from nanovllm.kernels.table import PLAIN_PLACES, Kernels, nothing

CPU_PLACES = PLAIN_PLACES | {
    "rms_norm": "cpu.rms_norm",
    "add_rms_norm": "cpu.rms_norm",
    "silu_and_mul": "cpu.silu_and_mul",
    "gelu_and_mul": "cpu.gelu_and_mul",
    "sigmoid_and_mul": "cpu.sigmoid_and_mul",
    "norm_rope_store": "cpu.norm_rope_store",
    "mask": "cpu.mask",
    "sample": "cpu.sample",
    "sample_masked": "cpu.sample",
    "read_table": "cpu.read_table",
    "arrange": "cpu.arranged",
    "arrange_plain": "cpu.tiled_linear",
    "plain_of": "cpu.tiled_linear",
    "arranged_linear": "cpu.tiled_linear:tiled_linear",
    "arrange_blocks": "cpu.block_linear",
    "block_linear": "cpu.block_linear",
    "block_rows": "cpu.block_linear",
    "group_rows": "cpu.lora",
    "lora_down": "cpu.lora",
    "lora_up": "cpu.lora",
    "causal_conv": "cpu.causal_conv",
    "channel_delta": "cpu.channel_delta",
    "gated_delta": "cpu.gated_delta",
    "gated_norm": "cpu.gated_norm",
    "state_space": "cpu.state_space",
}


# Kernels whose rows never depend on the number of rows, also where others are faster.
IN_ONE_ORDER = {"arrange_plain": "cpu.tiled_linear:arrange_in_one_order"}


def cpu_kernels(one_order: bool = False) -> Kernels:
    """The CPU's kernels in C++; each call is a RuntimeError where they cannot be compiled.

    If sums have one order, oneDNN multiplies no weights.
    """
    places = CPU_PLACES | IN_ONE_ORDER if one_order else CPU_PLACES
    return Kernels(
        "C++", places, rounding=nothing, few_rows=nothing, router=nothing,
        write_table=None, peers=None, avoids_pytorch=one_order,
    )  # fmt: skip
