"""What quantization costs in quality: sums got right, and distances of next-token distributions.

    python benchmarks/quality.py [--models embedded,wide] [--variants int8,int4] [--context 2048]
    python benchmarks/quality.py --model FILE.gguf|DIRECTORY [--variants int4,Q4_0]
    python benchmarks/quality.py --model FILE.gguf --variants Q4_K,Q6_K --llama-python PYTHON

The reference is the same model in float32, not quantized. Variants compute in float32 too, except
`bf16`, which shows how much the usual rounding costs. Reported are, for each model and variant:

- sums: the share of held-out sums that the embedded model gets right, alone and after solved ones;
- KL: the mean divergence of the variant's distributions from the reference's, in nats, over the
  whole vocabulary, at all positions of some texts; and top 1: where both prefer the same token;
- with the model `long`, the same for ranges of positions, up to `--context`.

With `--model`, the model is a trained one. Its dequantized weights are the reference. Variants are
then also types of GGUF files, to which the package gguf rounds the weights of linear layers, or
llama.cpp in a Python that has the package llama-cpp-python (k-quants and IQ4), and checkpoints that
`nanovllm quantize` saves, with a calibration text of Python's source. Reported are also the
perplexity of pages of Python's reference, and the mean absolute error of
log-probabilities, of those pages' tokens and of the whole vocabulary.

The other models, except `embedded`, have random weights: they show how formats compare with
each other, not what a trained model loses. One JSON line for each model and variant, then tables.
"""

import argparse
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.calibrated import SAVED
from benchmarks.llama_types import LLAMA_TYPES
from benchmarks.rounded import TYPES
from nanovllm import LLM, SamplingParams
from nanovllm.bench.machine import machine_name
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.parts import build_model

# hidden, intermediate, layers, heads, KV heads, vocabulary, tied, architecture
MODELS: dict[str, tuple[int, int, int, int, int, int, bool, str]] = {
    "wide": (1024, 3072, 2, 16, 8, 4000, True, "Qwen3"),
    "deep": (256, 768, 24, 4, 2, 4000, True, "Qwen3"),
    "untied": (512, 1536, 6, 8, 2, 16_000, False, "Llama"),
    "long": (256, 512, 2, 4, 2, 1000, True, "Qwen3"),
}
EMBEDDED, LONG = "embedded", "long"
KV: dict[str, Any] = dict(kv_cache_dtype="fp8")
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": dict(dtype="bfloat16"),
    "fp8": dict(quantization="fp8"),
    "int8": dict(quantization="int8"),
    "int4": dict(quantization="int4"),
    "kv fp8": KV,
    "fp8 + kv fp8": dict(quantization="fp8") | KV,
    "int8 + kv fp8": dict(quantization="int8") | KV,
    "int4 + kv fp8": dict(quantization="int4") | KV,
}
OF_LONG = ("bf16", "kv fp8")  # what depends on the length
NUM_TEXTS, TEXT_TOKENS, LINES = 4, 256, 24
ROWS = 1024  # of distributions compared at a time


def write_model(name: str, path: Path, max_positions: int) -> str:
    """Write a model of random weights with peaked attention and outputs; returns its directory."""
    hidden, inner, layers, heads, kv_heads, vocab_size, tied, family = MODELS[name]
    config = dict(
        architectures=[f"{family}ForCausalLM"], hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=64, vocab_size=vocab_size, tie_word_embeddings=tied, rms_norm_eps=1e-6,
        max_position_embeddings=max_positions, rope_theta=1e6, torch_dtype="bfloat16",
    )  # fmt: skip
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with torch.device("meta"):
        model = build_model(ModelConfig.from_dir(path), max_positions=16)
    tensors = {}
    for key, param in model.named_parameters():
        values = torch.empty(param.shape)
        if param.dim() == 1:
            values.uniform_(1.0, 2.0)
        else:
            values.normal_(0.0, param.shape[1] ** -0.5)
        tensors[key] = values.bfloat16()
    save_file(tensors, path / "model.safetensors")
    return str(path)


def solved_lines(number: int, skip: int) -> str:
    """Held-out sums with their answers, a line each."""
    problems = sample_problems(skip + number)[skip:]
    return "".join(f"{prompt}{answer}\n" for prompt, answer in problems)


@contextmanager
def recorded_logits(llm: LLM) -> Iterator[list[torch.Tensor]]:
    """The logits that the model computes inside, in the order of a prompt's tokens."""
    model = llm.model_runner.shard.model
    rows: list[torch.Tensor] = []

    def compute_logits(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = CausalLM.compute_logits(model, hidden, out)
        rows.append(logits.float().clone())
        return logits

    model.compute_logits = compute_logits  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        del model.compute_logits


def logprobs(llm: LLM, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities [T, vocab] of the token after each of a prompt's."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with recorded_logits(llm) as rows:
        llm.generate([prompt], params, use_tqdm=False)
    found = torch.cat(rows).log_softmax(dim=1)
    assert len(found) == len(prompt)
    return found


def compare(reference: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row: the divergence of `other` from the reference; whether both prefer one token."""
    parts = [
        (a.double().exp() * (a.double() - b.double())).sum(dim=1)
        for a, b in zip(reference.split(ROWS), other.split(ROWS), strict=True)
    ]
    return torch.cat(parts), reference.argmax(dim=1) == other.argmax(dim=1)


def ranges(context: int) -> list[tuple[int, int]]:
    """The second half of a context of 256 tokens, and of those 4 to 8 times as long as the last."""
    ends = [end for end in (256, 2048, 8192, 32_768) if end < context]
    return [(end // 2, end) for end in (*ends, context)]


def accuracy(llm: LLM, problems: list[tuple[str, str]], context: str) -> float:
    """The share of problems with an answer that is right and ends where it should."""
    params = SamplingParams(temperature=0, max_tokens=12)
    outputs = llm.generate([context + prompt for prompt, _ in problems], params, use_tqdm=False)
    pairs = zip(outputs, problems, strict=True)
    right = [out["text"] == p[1] and out["finish_reason"] == "stop" for out, p in pairs]
    return sum(right) / len(right)


def texts_of(name: str, llm: LLM, context: int) -> list[list[int]]:
    """The prompts, as token ids; their next tokens are compared."""
    if name == EMBEDDED:
        texts = [solved_lines(LINES, skip=LINES * i) for i in range(NUM_TEXTS)]
        return [list(llm.tokenizer.encode(text)) for text in texts]
    generator = torch.Generator().manual_seed(1)
    shape = (1, context) if name == LONG else (NUM_TEXTS, TEXT_TOKENS)
    ids: list[list[int]] = torch.randint(MODELS[name][5], shape, generator=generator).tolist()
    return ids


def open_llm(path: str, name: str, context: int, variant: dict[str, Any]) -> LLM:
    """The model with a variant's options; prompts are computed whole, without a prefix cache."""
    options: dict[str, Any] = dict(
        device="cpu", dtype="float32", enable_prefix_caching=False, cpu_kvcache_gib=0.5,
        max_model_len=context + 8 if name == LONG else 512,
    )  # fmt: skip
    return LLM(path, **options | variant)


def measure(path: str, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A result for the reference, without distances, and for each variant."""
    chosen = [v for v in args.variants if name != LONG or v in OF_LONG]
    problems, context = sample_problems(args.problems), solved_lines(8, skip=args.problems)
    references: list[torch.Tensor] = []
    results = []
    for variant in ("float32", *chosen):
        start = time.perf_counter()
        result: dict[str, Any] = {"benchmark": "quality", "model": name, "variant": variant}
        with open_llm(path, name, args.context, VARIANTS.get(variant, {})) as llm:
            if name == EMBEDDED:
                result["sums"] = accuracy(llm, problems, "")
                result["sums_after_others"] = accuracy(llm, problems[:500], context)
            found = [logprobs(llm, text) for text in texts_of(name, llm, args.context)]
        references = references or found
        pairs = [compare(a, b) for a, b in zip(references, found, strict=True)]
        kl, same = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        result |= {"kl": kl.mean().item(), "top_1": same.double().mean().item()}
        if name == LONG:
            result["kl_at"] = {f"{a}-{b}": kl[a:b].mean().item() for a, b in ranges(args.context)}
        result |= {"seconds": round(time.perf_counter() - start, 1), "machine": machine_name()}
        print(json.dumps(result), flush=True)
        results.append(result)
    return results


def print_table(results: list[dict[str, Any]]) -> None:
    """A table of one model's results, in Markdown."""
    columns = {"KL": [f"{r['kl']:.1e}" for r in results],
               "top 1": [f"{r['top_1']:.2%}" for r in results]}  # fmt: skip
    if "sums" in results[0]:
        columns["sums"] = [f"{r['sums']:.2%}" for r in results]
        columns["after solved ones"] = [f"{r['sums_after_others']:.2%}" for r in results]
    for part in results[0].get("kl_at", {}):
        columns[f"KL at {part}"] = [f"{r['kl_at'][part]:.1e}" for r in results]
    print(f"\n| {results[0]['model']} | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
    for index, result in enumerate(results):
        cells = " | ".join(values[index] for values in columns.values())
        print(f"| {result['variant']} | {cells} |", flush=True)


def names(known: list[str]) -> Any:
    """A parser of names with commas between them."""

    def parse(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return found

    return parse


def main() -> None:
    """Measure each model, and print its JSON lines and its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    models = [EMBEDDED, *MODELS]
    parser.add_argument("--models", type=names(models), default=models, metavar="NAME,...",
                        help=", ".join(models))  # fmt: skip
    variants = [*VARIANTS, *TYPES, *LLAMA_TYPES, *SAVED]
    parser.add_argument("--variants", type=names(variants), metavar="NAME,...",
                        help=f"{', '.join(variants)}; the last ones need --model")  # fmt: skip
    parser.add_argument("--model", type=Path, metavar="PATH",
                        help="a trained model instead: a GGUF file, or a directory")  # fmt: skip
    parser.add_argument("--llama-python", metavar="PYTHON",
                        help="a Python with llama-cpp-python, for k-quants and IQ4")  # fmt: skip
    parser.add_argument("--context", type=int, default=32_768, metavar="N",
                        help="tokens of the model `long`")  # fmt: skip
    parser.add_argument("--problems", type=int, default=2000, metavar="N", help="sums to solve")
    args = parser.parse_args()
    if args.context < 2 or args.problems < 1:
        parser.error("--context must be at least 2, --problems at least 1")
    asked = set(args.variants or ())
    if args.model is None and asked & {*TYPES, *LLAMA_TYPES, *SAVED}:
        parser.error("--variants: types of GGUF, and saved checkpoints, need --model")
    if asked & set(LLAMA_TYPES) and args.llama_python is None:
        parser.error("--variants: k-quants and IQ4 need --llama-python")
    torch.manual_seed(0)
    logging.getLogger("nanovllm").setLevel(logging.ERROR)  # random models have no tokenizer
    args.variants = args.variants or [*VARIANTS, *(TYPES if args.model else ())]
    tables = []
    with TemporaryDirectory() as folder:
        if args.model is not None:
            from benchmarks.trained import measure_trained

            measure_trained(args.model, args.variants, Path(folder), args.llama_python)
            return
        for name in args.models:
            path = EMBEDDED_MODEL
            if name != EMBEDDED:
                path = write_model(name, Path(folder) / name, max(args.context + 8, 512))
            tables.append(measure(path, name, args))
    for results in tables:
        print_table(results)


if __name__ == "__main__":
    main()
