"""Prompts whose adapters differ, and what transformers and peft make of them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from adapter_files import EVERY_LINEAR, MOE, MOE_SHAPES, make_adapter, merge, write_adapter
from audits import audit_adapters
from conftest import make_model
from peft import PeftModel
from reference import Case, decisive, load_reference, make_prompts, reference_logits

from nanovllm import LLM, LoRARequest
from nanovllm.outputs import RequestOutput

ADAPTERS: dict[str, dict[str, Any]] = {
    "linear": {},
    "all": dict(target_modules="all-linear"),  # of any family
    "all but out_proj": dict(  # which peft refuses for families of state spaces
        target_modules=r".*\.(in_proj|[qkvo]_proj|(gate|up|down)_proj)"
    ),
    "latent": dict(target_modules=r".*\.(in_proj|[qkvo]_proj|(up|down)_proj|fc._latent_proj)"),
    "all but shared experts": dict(  # which peft loses when it loads adapters of Laguna
        target_modules=r".*\.(self_attn\.[qkvog]_proj|mlp\.(gate|up|down)_proj)"
    ),
    "odd": dict(r=3, lora_alpha=5, use_rslora=True, rank_pattern={"q_proj": 5}),
    "attention": dict(r=8, target_modules=["q_proj", "v_proj"]),
    "whole": dict(target_modules=[*EVERY_LINEAR, "embed_tokens", "lm_head"]),
    "stacks": dict(  # of experts in files that have nothing else, as of gpt-oss
        target_modules="all-linear",
        target_parameters=["mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"],
    ),
    "experts": dict(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]),
}
DENSE = ("linear", "odd", "attention", "whole")
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
    folder: Path, every: int = 1, names: Collection[str] = DENSE, **overrides: Any
) -> AdaptedCase:
    """Each prompt, or some of them, with an adapter of peft's in turn, or none."""
    return with_adapters(make_model(folder / "model", **overrides), folder, every, names)


def with_adapters(path: Path, folder: Path, every: int, names: Collection[str]) -> AdaptedCase:
    """The same for the model in `path`; `folder` is for the adapters."""
    adapters = [
        LoRARequest(name, str(make_adapter(path, folder / name, seed, **ADAPTERS[name])))
        for seed, name in enumerate(names)
    ]

    def load(adapter: LoRARequest) -> Any:
        return PeftModel.from_pretrained(load_reference(path), adapter.path).eval()

    return _adapted_case(path, adapters, make_prompts()[::every], load)


def make_experts_case(folder: Path, every: int = 1) -> AdaptedCase:
    """The same with adapters of experts, which the reference has merged into its weights."""
    path = make_model(folder / "model", **MOE)
    adapters = [
        LoRARequest(f"{i}", write_adapter(folder / f"{i}", MOE_SHAPES, 3 + i, i)) for i in range(3)
    ]

    def load(adapter: LoRARequest) -> Any:
        return load_reference(merge(path, Path(adapter.path), folder / f"merged {adapter.name}"))

    return _adapted_case(path, adapters, make_prompts()[::every], load)


def _adapted_case(
    path: Path,
    adapters: list[LoRARequest],
    prompts: list[list[int]],
    load: Callable[[LoRARequest], Any],
) -> AdaptedCase:
    """`load` makes transformers' model with an adapter. Equal prompts differ in theirs."""
    chosen: list[LoRARequest | None] = [None, *adapters]
    requests = [chosen[index % len(chosen)] for index in range(len(prompts))]
    found = {}
    for adapter in chosen:
        model = load_reference(path) if adapter is None else load(adapter)
        own = [index for index, request in enumerate(requests) if request is adapter]
        found |= zip(own, reference_logits(model, [prompts[index] for index in own]), strict=True)
    logits = torch.stack([found[index] for index in range(len(prompts))])
    kept = decisive(logits, least=min(50, len(logits)))
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
    audit_adapters(llm.adapters.slot_table, llm.scheduler.running)
