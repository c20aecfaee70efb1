"""Prompts whose adapters differ, and what transformers and peft make of them."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from adapter_files import EVERY_LINEAR, make_adapter
from conftest import make_model
from peft import PeftModel
from reference import Case, decisive, load_reference, make_prompts, reference_logits

from nanovllm import LLM, LoRARequest
from nanovllm.outputs import RequestOutput

ADAPTERS: dict[str, dict[str, Any]] = {
    "linear": {},
    "odd": dict(r=3, lora_alpha=5, use_rslora=True, rank_pattern={"q_proj": 5}),
    "attention": dict(r=8, target_modules=["q_proj", "v_proj"]),
    "whole": dict(target_modules=[*EVERY_LINEAR, "embed_tokens", "lm_head"]),
}
OPTIONS: dict[str, Any] = dict(enable_lora=True, max_loras=4, max_lora_rank=8)


@dataclass(frozen=True)
class AdaptedCase(Case):
    """A model, its adapters, prompts with the adapters of each, and what comes of them."""

    adapters: list[LoRARequest]
    requests: list[LoRARequest | None]

    def generate(self, llm: LLM) -> list[RequestOutput]:
        """All prompts in one call."""
        return llm.generate(self.prompts, self.params, False, self.requests)


def make_adapted_case(
    folder: Path, every: int = 1, names: Collection[str] = tuple(ADAPTERS), **overrides: Any
) -> AdaptedCase:
    """Each prompt, or some of them, with an adapter in turn, or none; equal prompts differ."""
    path = make_model(folder / "model", **overrides)
    adapters = [
        LoRARequest(name, str(make_adapter(path, folder / name, seed, **ADAPTERS[name])))
        for seed, name in enumerate(names)
    ]
    prompts = make_prompts()[::every]
    chosen: list[LoRARequest | None] = [None, *adapters]
    requests = [chosen[index % len(chosen)] for index in range(len(prompts))]
    found = {}
    for adapter in chosen:
        model = load_reference(path)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter.lora_path).eval()
        own = [index for index, request in enumerate(requests) if request is adapter]
        found |= zip(own, reference_logits(model, [prompts[index] for index in own]), strict=True)
    logits = torch.stack([found[index] for index in range(len(prompts))])
    kept = decisive(logits)
    logits = logits[kept]
    return AdaptedCase(
        path,
        [prompts[index] for index in kept],
        logits.argmax(-1).tolist(),
        logits,
        adapters,
        [requests[index] for index in kept],
    )


def audit_slots(llm: LLM) -> None:
    """Slots and sequences agree."""
    assert llm.adapters is not None
    llm.adapters.residents.audit(llm.scheduler.running)
