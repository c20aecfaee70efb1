"""Prompts whose adapters differ, and what transformers and peft make of them."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter_files import EVERY_LINEAR, make_adapter
from conftest import make_model
from peft import PeftModel
from reference import MIN_MARGIN, NUM_STEPS, load_reference, make_prompts, reference_logits

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.outputs import RequestOutput

ADAPTERS: dict[str, dict[str, Any]] = {
    "linear": {},
    "odd": dict(r=3, lora_alpha=5, use_rslora=True, rank_pattern={"q_proj": 5}),
    "attention": dict(r=8, target_modules=["q_proj", "v_proj"]),
    "whole": dict(target_modules=[*EVERY_LINEAR, "embed_tokens", "lm_head"]),
}
OPTIONS: dict[str, Any] = dict(enable_lora=True, max_loras=4, max_lora_rank=8)


@dataclass(frozen=True)
class AdaptedCase:
    """A model, its adapters, prompts with the adapters of each, and the tokens that come."""

    path: Path
    adapters: list[LoRARequest]
    prompts: list[list[int]]
    requests: list[LoRARequest | None]
    tokens: list[list[int]]

    @property
    def params(self) -> list[SamplingParams]:
        """Greedy, of different lengths."""
        return [
            SamplingParams(temperature=0, max_tokens=NUM_STEPS - 3 * index % 11, ignore_eos=True)
            for index in range(len(self.prompts))
        ]

    @property
    def expected(self) -> list[list[int]]:
        """The reference's tokens, as far as `params` let them come."""
        return [t[: p.max_tokens] for t, p in zip(self.tokens, self.params, strict=True)]

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
    kept, tokens = [], []
    for adapter in chosen:
        model = load_reference(path)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter.lora_path).eval()
        own = [index for index, request in enumerate(requests) if request is adapter]
        logits = reference_logits(model, [prompts[index] for index in own])
        best = logits.topk(2, dim=-1).values
        clear = ((best[..., 0] - best[..., 1]).amin(dim=1) > MIN_MARGIN).tolist()
        rows = zip(own, logits.argmax(-1).tolist(), clear, strict=True)
        for index, row, decides in rows:
            if decides:
                kept.append(index)
                tokens.append(row)
    assert len(kept) >= 5 * len(prompts) // 6, "too many near-ties: choose another seed"
    assert len({token for row in tokens for token in row}) > 50, "the model says always the same"
    order = sorted(range(len(kept)), key=kept.__getitem__)
    return AdaptedCase(
        path,
        adapters,
        [prompts[kept[i]] for i in order],
        [requests[kept[i]] for i in order],
        [tokens[i] for i in order],
    )


def audit_slots(llm: LLM) -> None:
    """Slots and sequences agree."""
    assert llm.adapters is not None
    llm.adapters.residents.audit(llm.scheduler.running)
