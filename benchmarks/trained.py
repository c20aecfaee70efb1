"""What rounding costs a trained model: the part of quality.py for a file or a directory."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from benchmarks.calibrated import SAVED, saved_checkpoint
from benchmarks.llama_types import LLAMA_TYPES
from benchmarks.quality import VARIANTS, compare, logprobs, open_llm
from benchmarks.rounded import TYPES, pages, plain_checkpoint, rounded_checkpoint
from nanovllm import LLM
from nanovllm.bench.machine import machine_name

NUM_PAGES, PAGE_TOKENS = 16, 96
COLUMNS = {
    "perplexity": "perplexity", "text_error": "error of the text", "error": "error of all tokens",
    "kl": "KL", "top_1": "same token",
}  # fmt: skip


def measure_trained(model: Path, variants: list[str], folder: Path, python: str | None) -> None:
    """Print a line of JSON for the reference and each variant, then a table in Markdown.

    `python` has the package llama-cpp-python, for LLAMA_TYPES.
    """
    plain = plain_checkpoint(model, folder)
    reference: list[torch.Tensor] = []
    rows = []
    for variant in ("float32", *variants):
        is_type = variant in (*TYPES, *LLAMA_TYPES)
        path = plain
        if is_type:
            path = rounded_checkpoint(plain, variant, folder, python)
        elif variant in SAVED:
            path = saved_checkpoint(plain, variant, folder)
        with open_llm(str(path), variant, 0, VARIANTS.get(variant, {})) as llm:
            prompts = prompts_of(llm)
            found = [logprobs(llm, prompt) for prompt in prompts]
        if path != plain:
            shutil.rmtree(path)
        reference = reference or found
        result = distances(prompts, reference, found)
        line = {"benchmark": "quality", "model": model.name, "variant": variant} | result
        print(json.dumps(line | {"machine": machine_name()}), flush=True)
        rows.append((variant, result))
    print(f"\n| {model.name} | {' | '.join(COLUMNS.values())} |\n|{'---|' * (1 + len(COLUMNS))}")
    for variant, result in rows:
        print(f"| {variant} | {' | '.join(f'{result[key]:.3g}' for key in COLUMNS)} |")


def prompts_of(llm: LLM) -> list[list[int]]:
    """The first tokens of each page."""
    ids = [list(llm.tokenizer.encode(text)) for text in pages(NUM_PAGES)]
    return [some[:PAGE_TOKENS] for some in ids]


def distances(
    prompts: list[list[int]], reference: list[torch.Tensor], found: list[torch.Tensor]
) -> dict[str, Any]:
    """Means over all tokens of the pages, of log-probabilities [T, vocab] of each page."""
    pairs = [compare(a, b) for a, b in zip(reference, found, strict=True)]
    kl, same = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    texts = [of_text(*pair) for pair in zip(prompts, found, strict=True)]
    exact = [of_text(*pair) for pair in zip(prompts, reference, strict=True)]
    errors = [(a - b).abs().mean(1) for a, b in zip(reference, found, strict=True)]
    return {
        "perplexity": (-torch.cat(texts)).mean().exp().item(),
        "text_error": (torch.cat(texts) - torch.cat(exact)).abs().mean().item(),
        "error": torch.cat(errors).mean().item(),
        "kl": kl.mean().item(),
        "top_1": same.double().mean().item(),
    }


def of_text(prompt: list[int], found: torch.Tensor) -> torch.Tensor:
    """The log-probability of each token after the first."""
    return found[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].double()
