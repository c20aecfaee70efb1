"""GGUF files with random weights of published shapes, which `llama_peer.py` measures.

It imports `gguf` and `llama_cpp`, and nothing else of this project. Weights are written in
bfloat16; llama.cpp's own function quantizes them.
"""

import sys
from pathlib import Path
from typing import Any

CONTEXT = 2048
NORMAL = 0.02  # the standard deviation of matrices


class Writer:
    """A file that is being written. Peak memory: all weights, and a matrix in float32."""

    def __init__(self, file: Path, architecture: str, fields: dict[str, Any]) -> None:
        import gguf
        import numpy as np

        self.rng = np.random.default_rng(0)
        self.file = gguf.GGUFWriter(file, architecture)
        for name, value in fields.items():
            key = f"{architecture}.{name}"
            add = {int: self.file.add_uint32, float: self.file.add_float32}
            add.get(type(value), self.file.add_array)(key, value)
        self.file.add_tokenizer_model("none")

    def add(self, name: str, *shape: int, value: float = 1.0) -> None:
        """A matrix of normal numbers in bfloat16, or a vector with one value in float32."""
        import gguf
        import numpy as np

        if len(shape) == 1:
            self.file.add_tensor(name, np.full(shape, value, np.float32))
            return
        numbers = self.rng.standard_normal(shape, np.float32) * np.float32(NORMAL)
        if "conv1d" in name:  # float32 in every file
            self.file.add_tensor(name, numbers)
            return
        upper = np.ascontiguousarray(numbers.view(np.uint16)[:, 1::2])
        self.file.add_tensor(name, upper.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    def add_feed_forward(self, block: str, hidden: int, inner: int) -> None:
        """The three matrices of a layer's feed-forward part."""
        for name in ("gate", "up"):
            self.add(f"{block}.ffn_{name}.weight", inner, hidden)
        self.add(f"{block}.ffn_down.weight", hidden, inner)

    def close(self) -> None:
        """Write everything."""
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def usual_fields(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int,
                 head_dim: int, theta: float) -> dict[str, Any]:  # fmt: skip
    """The metadata that both shapes have."""
    return {
        "vocab_size": vocab, "context_length": CONTEXT, "embedding_length": hidden,
        "feed_forward_length": inner, "block_count": layers, "attention.head_count": heads,
        "attention.head_count_kv": kv_heads, "attention.key_length": head_dim,
        "attention.value_length": head_dim, "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": theta,
    }  # fmt: skip


def write_attention(writer: Writer, block: str, hidden: int, queries: int, heads: int,
                    kv_heads: int, head_dim: int) -> None:  # fmt: skip
    """Attention with norms of queries and keys; `queries` are the rows of attn_q."""
    keys = kv_heads * head_dim
    for name, size in (("q", queries), ("k", keys), ("v", keys)):
        writer.add(f"{block}.attn_{name}.weight", size, hidden)
    for name in ("q", "k"):
        writer.add(f"{block}.attn_{name}_norm.weight", head_dim)
    writer.add(f"{block}.attn_output.weight", hidden, heads * head_dim)


def write_qwen3(file: Path, vocab: int = 151_936, hidden: int = 1024, inner: int = 3072,
                layers: int = 28, heads: int = 16, kv_heads: int = 8,
                head_dim: int = 128) -> None:  # fmt: skip
    """Qwen3-0.6B, or a smaller model like it."""
    fields = usual_fields(vocab, hidden, inner, layers, heads, kv_heads, head_dim, 1e6)
    writer = Writer(file, "qwen3", fields)
    writer.add("token_embd.weight", vocab, hidden)
    writer.add("output_norm.weight", hidden)
    for block in (f"blk.{i}" for i in range(layers)):
        for norm in ("attn", "ffn"):
            writer.add(f"{block}.{norm}_norm.weight", hidden)
        write_attention(writer, block, hidden, heads * head_dim, heads, kv_heads, head_dim)
        writer.add_feed_forward(block, hidden, inner)
    writer.close()


def write_qwen35(file: Path, vocab: int = 248_320, hidden: int = 1024, inner: int = 3584,
                 layers: int = 24, heads: int = 8, kv_heads: int = 2, head_dim: int = 256,
                 linear_heads: int = 16, linear_dim: int = 128) -> None:  # fmt: skip
    """Qwen3.5-0.8B's text model: every fourth layer has attention, others a gated delta net."""
    inside = linear_heads * linear_dim
    fields = usual_fields(vocab, hidden, inner, layers, heads, kv_heads, head_dim, 1e7) | {
        "rope.dimension_count": head_dim // 4, "rope.dimension_sections": [11, 11, 10, 0],
        "full_attention_interval": 4, "ssm.conv_kernel": 4, "ssm.state_size": linear_dim,
        "ssm.group_count": linear_heads, "ssm.time_step_rank": linear_heads,
        "ssm.inner_size": inside,
    }  # fmt: skip
    writer = Writer(file, "qwen35", fields)
    writer.add("token_embd.weight", vocab, hidden)
    writer.add("output_norm.weight", hidden)
    for index, block in enumerate(f"blk.{i}" for i in range(layers)):
        for norm in ("attn", "post_attention"):
            writer.add(f"{block}.{norm}_norm.weight", hidden)
        if index % 4 == 3:  # attn_q has queries and gates
            write_attention(writer, block, hidden, 2 * heads * head_dim, heads, kv_heads, head_dim)
        else:
            writer.add(f"{block}.attn_qkv.weight", 3 * inside, hidden)
            writer.add(f"{block}.attn_gate.weight", inside, hidden)
            writer.add(f"{block}.ssm_conv1d.weight", 3 * inside, 4)
            writer.add(f"{block}.ssm_a", linear_heads, value=-0.5)
            writer.add(f"{block}.ssm_dt.bias", linear_heads, value=-1.0)
            for name in ("alpha", "beta"):
                writer.add(f"{block}.ssm_{name}.weight", linear_heads, hidden)
            writer.add(f"{block}.ssm_norm.weight", linear_dim)
            writer.add(f"{block}.ssm_out.weight", hidden, inside)
        writer.add_feed_forward(block, hidden, inner)
    writer.close()


SHAPES = {"qwen3-0.6b": write_qwen3, "qwen3.5-0.8b": write_qwen35}


def gguf_file(name: str, folder: Path, threads: int) -> Path:
    """A file by its path, or that of SHAPE:FORMAT in `folder`, written if there is none."""
    if name.endswith(".gguf"):
        return Path(name)
    shape, _, kind = name.partition(":")
    file = folder / f"{shape}-{kind}.gguf"
    if file.exists():
        return file
    part = file.with_suffix(".part")
    if kind == "BF16":
        SHAPES[shape](part)
    else:
        quantize(gguf_file(f"{shape}:BF16", folder, threads), part, kind, threads)
    return part.replace(file)


def quantize(source: Path, file: Path, kind: str, threads: int) -> None:
    """Write a file in another format, as llama.cpp chooses the types of its matrices."""
    import llama_cpp as cpp

    params = cpp.llama_model_quantize_default_params()
    params.ftype = getattr(cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = threads
    if cpp.llama_model_quantize(bytes(source), bytes(file), params):
        sys.exit(f"llama.cpp cannot quantize to {kind}")
