"""Small LoRA adapters of the peft package, and what it computes with them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from reference import auto_class
from safetensors.torch import load_file, save_file

EVERY_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# A model of experts, and modules for `write_adapter` with a name for each expert: peft itself saves
# all experts of a layer as one tensor.
MOE: dict[str, Any] = dict(
    family="Qwen3Moe", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24,
    decoder_sparse_step=2, num_attention_heads=8, num_key_value_heads=4,
)  # fmt: skip
EXPERT = {"gate_proj": (24, 64), "up_proj": (24, 64), "down_proj": (64, 24)}
MOE_SHAPES = {
    f"model.layers.1.mlp.experts.{expert}.{kind}": shape
    for expert in range(5)
    for kind, shape in EXPERT.items()
    if (expert, kind) not in ((1, "up_proj"), (2, "down_proj"))
} | {"model.layers.0.mlp.up_proj": (96, 64), "model.layers.1.self_attn.o_proj": (64, 128)}


def make_adapter(model: Path, path: Path, seed: int = 0, **options: Any) -> Path:
    """Save a random adapter for the model in a directory, as peft itself saves it."""
    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 6, "target_modules": EVERY_LINEAR} | options
    base = auto_class(model).from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))
    for name, param in adapted.named_parameters():
        if "lora_" in name:
            param.data.normal_(0.0, 0.2)
    adapted.save_pretrained(path)
    return path


@torch.inference_mode()
def peft_logits(model: Path, adapter: Path | None, prompt: list[int]) -> torch.Tensor:
    """The logits [T, vocab] that transformers and peft compute of a prompt."""
    base = auto_class(model).from_pretrained(model, dtype=torch.float32)
    adapted: Any = base if adapter is None else PeftModel.from_pretrained(base, adapter)
    logits: torch.Tensor = adapted.eval()(torch.tensor([prompt])).logits[0]
    return logits


def write_adapter(
    path: Path, shapes: dict[str, tuple[int, int]], rank: int = 3, seed: int = 0, **fields: Any
) -> Path:
    """Write a random adapter for modules of shapes (out, in), without the help of peft."""
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (size_out, size_in) in shapes.items():
        start = f"base_model.model.{name}"
        tensors[f"{start}.lora_A.weight"] = torch.randn(rank, size_in, generator=generator) * 0.2
        tensors[f"{start}.lora_B.weight"] = torch.randn(size_out, rank, generator=generator) * 0.2
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": None}
    (path / "adapter_config.json").write_text(json.dumps(config | fields))
    return path


def merge(model: Path, adapter: Path, path: Path, scale: float = 2.0) -> Path:
    """A copy of a checkpoint with an adapter of `write_adapter` added to its weights."""
    shutil.copytree(model, path)
    weights = load_file(path / "model.safetensors")
    added = load_file(adapter / "adapter_model.safetensors")
    for key, a in added.items():
        if ".lora_A." in key:
            b = added[key.replace("lora_A", "lora_B")]
            name = key.removeprefix("base_model.model.").replace("lora_A.", "")
            weights[name] = weights[name] + scale * (b @ a)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
