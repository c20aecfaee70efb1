"""The host's time for structured outputs: reading a vocabulary, compiling, filling masks.

    python benchmarks/constraints.py [--vocab 150000] [--repeats 20]
    python benchmarks/constraints.py --generate qwen3-42m

Texts of each kind are followed token by token, as the engine does: a mask, then the token. The
longest time of all masks of the first text is apart: llguidance builds its states when they are
first needed. One thread fills a mask; with 256 rows all do. Prints a line of JSON for each kind,
times in microseconds.

With --generate it compares tokens a second with and without drafts of forced tokens, in turns, of 1
and 16 requests for the schema with bounded texts. The model is a directory, or a shape with random
weights and a tokenizer that is trained on Python's own library.
"""

import argparse
import contextlib
import itertools
import json
import random
import statistics
import string
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nanovllm import LLM, SamplingParams, StructuredOutputs
from nanovllm.bench.shapes import SHAPES, write_shape
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.structured.grammars import Grammars
from nanovllm.structured.masks import Masks

EOS = "<eos>"
ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string"},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
    "required": ["street", "zip"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["a", "bb", "ccc"]},
        "address": ADDRESS,
    },
    "required": ["name", "age", "kind", "address"],
    "additionalProperties": False,
}
VALUE = {
    "name": "hello world", "age": 12, "tags": ["abc", "def ghi"], "kind": "bb",
    "address": {"street": "some street 12", "zip": "12345"},
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "schema": (dict(json=SCHEMA), json.dumps(VALUE)),
    "any object": (dict(json_object=True), json.dumps(VALUE)),
    "date": (dict(regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}"), "2026-01-31"),
    "words": (dict(regex=r"(\w+ ){3,30}end"), "some words that are drawn one by one end"),
    "1000 choices": (dict(choice=[f"choice number {i}" for i in range(1000)]), "choice number 77"),
}


def make_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Byte-level pairs of random words."""
    rng = random.Random(0)
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    while len(vocab) < size:
        word = rng.choice(["", "Ġ"])
        for letter in rng.choices(string.ascii_lowercase, k=rng.randint(2, 9)):
            if word and word + letter not in vocab:
                merges.append((word, letter))
                vocab[word + letter] = len(vocab)
            word += letter
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


def elapsed(start: float) -> float:
    """Microseconds since `start`."""
    return (time.perf_counter() - start) * 1e6


def follow(grammars: Grammars, asked: StructuredOutputs, ids: list[int]) -> list[float]:
    """The times of the masks in front of each token."""
    constraint, seq = grammars.constraint(asked), Sequence([0], SamplingParams())
    times = []
    for token_id in ids:
        constraint.update(seq)
        start = time.perf_counter()
        Masks([(constraint, [])]).fill()
        times.append(elapsed(start))
        seq.token_ids.append(token_id)
    end = constraint.update(seq)
    assert end is None or end.reason == "stop", end
    return times


def bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with texts and lists that random weights do not write on and on."""
    if schema.get("type") == "string" and "pattern" not in schema:
        return schema | {"maxLength": 24}
    if schema.get("type") == "integer":
        return schema | {"maximum": 999}
    if schema.get("type") == "array":
        return schema | {"items": bounded(schema["items"]), "maxItems": 2}
    parts = {name: bounded(part) for name, part in schema.get("properties", {}).items()}
    return schema | ({"properties": parts} if parts else {})


def train_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Byte-level pairs as they are made for models, from the sources of Python's library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"))
    texts = (path.read_text("utf-8", errors="ignore") for path in sources)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


def compare(model: str, repeats: int) -> None:
    """Generate with and without forced tokens, in turns, and print the speeds."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as engines:
        options: dict[str, Any] = dict(cpu_kvcache_gib=0.5)
        if model in SHAPES:
            options |= dict(load_format="dummy", tokenizer=folder)
            train_tokenizer(min(SHAPES[model][6], 32_000) - 1).save_pretrained(folder)
            model = write_shape(model, Path(folder))
        none = {"method": "none"}
        plain = engines.enter_context(LLM(model, speculative_config=none, **options))
        forced = engines.enter_context(LLM(model, **options))
        for compact, number in itertools.product((True, False), (1, 16)):
            space = None if compact else " ?"
            asked = StructuredOutputs(
                json=bounded(SCHEMA), disable_any_whitespace=compact, whitespace_pattern=space
            )
            params = [
                SamplingParams(max_tokens=300, seed=i, structured_outputs=asked)
                for i in range(number)
            ]
            speeds: dict[LLM, list[float]] = {plain: [], forced: []}
            for _ in range(repeats):
                for llm, found in speeds.items():
                    before = llm.stats()
                    start = time.perf_counter()
                    outputs = llm.generate([[1, 2, 3]] * number, params, use_tqdm=False)
                    seconds = time.perf_counter() - start
                    tokens = sum(len(output.token_ids) for output in outputs)
                    found.append(tokens / seconds)
                    accepted = llm.stats().accepted_tokens - before.accepted_tokens
            without, speed = (statistics.median(found) for found in speeds.values())
            figures = {
                "whitespace": not compact,
                "requests": number,
                "tokens": tokens,
                "forced": round(accepted / tokens, 2),
                "without": round(without),
                "tokens_per_s": round(speed),
                "ratio": round(speed / without, 2),
            }
            print(json.dumps(figures))


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--generate", metavar="MODEL", help="a directory or a shape's name")
    options = parser.parse_args()
    if options.generate is not None:
        compare(options.generate, options.repeats)
        return
    tokenizer = make_tokenizer(options.vocab)
    size = len(tokenizer)
    grammars = Grammars(tokenizer, size, [tokenizer.eos_token_id])
    start = time.perf_counter()
    grammars.constraint(StructuredOutputs(regex="a"))
    print(json.dumps({"read_vocabulary": round(elapsed(start)), "vocab": size}))
    for name, (given, text) in CASES.items():
        asked, ids = StructuredOutputs(**given), tokenizer.encode(text)
        start = time.perf_counter()
        grammars.constraint(asked)
        compiled = elapsed(start)
        first = follow(grammars, asked, ids)
        times = [t for _ in range(options.repeats) for t in follow(grammars, asked, ids)]
        rows = [(grammars.constraint(asked), list[int]()) for _ in range(256)]
        together = []
        for _ in range(options.repeats):
            start = time.perf_counter()
            Masks(rows).fill()
            together.append(elapsed(start))
        figures = {
            "case": name,
            "tokens": len(ids),
            "compile": round(compiled),
            "first_masks_max": round(max(first)),
            "median": round(statistics.median(times), 1),
            "p99": round(float(np.percentile(times, 99)), 1),
            "max": round(max(times)),
            "256_rows": round(statistics.median(together)),
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
