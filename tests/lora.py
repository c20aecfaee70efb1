"""Small LoRA adapters of the peft package, and what it computes with them."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

EVERY_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(model: Path, path: Path, seed: int = 0, **options: Any) -> Path:
    """Save a random adapter for the model in a directory, as peft itself saves it."""
    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 6, "target_modules": EVERY_LINEAR} | options
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))
    for name, param in adapted.named_parameters():
        if "lora_" in name:
            param.data.normal_(0.0, 0.2)
    adapted.save_pretrained(path)
    return path


@torch.inference_mode()
def peft_logits(model: Path, adapter: Path | None, prompt: list[int]) -> torch.Tensor:
    """The logits [T, vocab] that transformers and peft compute of a prompt."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted: Any = base if adapter is None else PeftModel.from_pretrained(base, adapter)
    logits: torch.Tensor = adapted.eval()(torch.tensor([prompt])).logits[0]
    return logits
