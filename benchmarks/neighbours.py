"""Count the requests whose answers depend on what else the engine computes.

    python benchmarks/neighbours.py [--shape qwen3-0.6b | --model DIR] [--layers 4]
        [--fields '{"hidden_size": 1024}'] [--requests 64] [--tokens 32]
        [--only "batches of 16" ...] [--options '{"batch_invariant": true}']

Each request is computed alone, and then in other company: in batches in another order, in chunks,
after preemption, on hits of the prefix cache, with drafts, and so on. A request counts as equal if
its tokens and their log-probabilities are the same, bit for bit. Weights are random, so that the
smallest difference changes tokens. A quarter of the requests is sampled, the rest is greedy.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.bench.shapes import SHAPES, write_shape

Prompts = list[list[int]]
Answer = tuple[tuple[int, ...], tuple[float, ...]]
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 255, 256, 257)  # around the ends of tiles and blocks
MOST_IDS = 20_000  # different tokens of prompts
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "hybrid_override_pattern")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
# How requests are computed: options of the engine, how many run together, other changes.
WAYS: dict[str, dict[str, Any]] = {
    "alone again": dict(size=1),
    "batches of 2": dict(size=2),
    "batches of 16": dict(size=16),
    "all together": dict(),
    "among 192 others": dict(others=192),
    "chunks of 64": dict(options=dict(max_num_batched_tokens=64)),
    "chunks of 1,000": dict(options=dict(max_num_batched_tokens=1000)),
    "preemption": dict(small_pool=True),
    "prefix hits": dict(repeats=2),
    "prefix hits of 16": dict(repeats=2, options=dict(kvcache_block_size=16)),
    "n-gram drafts": dict(options=dict(speculative_config=NGRAM)),
    "mixed steps": dict(options=dict(scheduling="mixed", max_num_batched_tokens=512)),
    "fair steps": dict(options=dict(scheduling="fair", max_num_batched_tokens=512)),
    "without graphs": dict(options=dict(enforce_eager=True)),
    "after sleep": dict(options=dict(enable_sleep_mode=True), sleeps=True),
    "all of it": dict(
        small_pool=True,
        options=dict(max_num_batched_tokens=96, scheduling="mixed", speculative_config=NGRAM),
    ),
}


def requests_of(
    count: int, longest: int, tokens: int, vocab_size: int = MOST_IDS
) -> tuple[Prompts, list[SamplingParams]]:
    """Prompts of many lengths, some of which share a beginning."""
    chosen = random.Random(0)
    vocab_size = min(vocab_size, MOST_IDS)
    shared = [chosen.randrange(vocab_size) for _ in range(longest)]
    prompts = []
    for index in range(count):
        length = min(longest, chosen.choice([*LENGTHS, chosen.randint(1, longest)]))
        own = [chosen.randrange(vocab_size) for _ in range(length)]
        prompts.append(shared[: length // 2] + own[length // 2 :] if index % 3 else own)
    params = [
        SamplingParams(
            temperature=0.8 if index % 4 == 3 else 0, seed=index, max_tokens=tokens,
            ignore_eos=True, logprobs=1,
        )
        for index in range(count)
    ]  # fmt: skip
    return prompts, params


def answers(llm: LLM, prompts: Prompts, params: list[SamplingParams], size: int) -> list[Answer]:
    """The answers to all requests, `size` at a time."""
    found = []
    for start in range(0, len(prompts), size):
        part = slice(start, start + size)
        for output in llm.generate(prompts[part], params[part], use_tqdm=False):
            sample = output.outputs[0]
            entries = zip(sample.token_ids, sample.logprobs or (), strict=True)
            logprobs = tuple(entry[token].logprob for token, entry in entries)
            found.append((tuple(sample.token_ids), logprobs))
    return found


def options_of(way: dict[str, Any], given: dict[str, Any], prompts: Prompts, tokens: int) -> str:
    """The options of a way's engine, as JSON."""
    options = {"max_model_len": 4096} | given | way.get("options", {})
    if way.get("small_pool"):  # for a quarter of all tokens, and for the longest request
        block = options.setdefault("kvcache_block_size", 64)
        lengths = [len(prompt) + tokens for prompt in prompts]
        options["num_kvcache_blocks"] = max(max(lengths), sum(lengths) // 4) // block + 2
        options["max_model_len"] = max(lengths)
    return json.dumps(options)


def compute(
    model: str, ways: dict[str, dict[str, Any]], given: dict[str, Any], prompts: Prompts,
    params: list[SamplingParams],
) -> Iterator[tuple[str, list[Answer]]]:  # fmt: skip
    """The answers in each way, in the order of the requests. Ways share engines."""
    tokens = params[0].max_tokens
    assert tokens is not None
    order = list(range(len(prompts)))
    random.Random(1).shuffle(order)
    shuffled = [prompts[i] for i in order], [params[i] for i in order]
    by_options: dict[str, list[str]] = {}
    for name, way in ways.items():
        by_options.setdefault(options_of(way, given, prompts, tokens), []).append(name)
    for options, names in by_options.items():
        with LLM(model, load_format="dummy", **json.loads(options)) as llm:
            for name in names:
                way = ways[name]
                lengths, ids = map(len, prompts), (max(prompt) for prompt in prompts)
                more = requests_of(way.get("others", 0), max(lengths), tokens, max(ids) + 1)
                company = [*more[0], *shuffled[0]], [*more[1], *shuffled[1]]
                if way.get("sleeps"):
                    llm.sleep(1)
                    llm.wake_up()
                for _ in range(way.get("repeats", 1)):
                    found = answers(llm, *company, way.get("size", len(company[0])))
                found = found[len(more[0]) :]
                yield name, [answer for _, answer in sorted(zip(order, found, strict=True))]


def changed(config: dict[str, Any], layers: int, fields: dict[str, Any]) -> dict[str, Any]:
    """A config with other fields of its text model, and only its first layers; 0 keeps all."""
    if isinstance(config.get("text_config"), dict):
        return config | {"text_config": changed(config["text_config"], layers, fields)}
    config = config | fields
    # Each of these has a name or a letter for each layer.
    kinds = {name: config[name] for name in KINDS if isinstance(config.get(name), list | str)}
    if layers:
        config |= {name: each[:layers] for name, each in kinds.items()}
        config |= {"num_hidden_layers": layers} if "num_hidden_layers" in config else {}
    return config


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--model", help="a directory with config.json, instead of a shape")
    parser.add_argument("--layers", type=int, default=4, help="of the model; 0: as it has")
    parser.add_argument("--fields", type=json.loads, default={}, help="of config.json, as JSON")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--longest", type=int, default=700, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--only", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--options", type=json.loads, default={"batch_invariant": True})
    args = parser.parse_args()
    if min(args.requests, args.longest, args.tokens) < 1:
        parser.error("requests, longest and tokens must be 1 or more")
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or write_shape(args.shape, Path(folder))
        shape = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
        if args.layers or args.fields:
            shape, model = changed(shape, args.layers, args.fields), folder
            Path(folder, "config.json").write_text(json.dumps(shape), encoding="utf-8")
        vocab_size = shape.get("text_config", shape).get("vocab_size", MOST_IDS)
        prompts, params = requests_of(args.requests, args.longest, args.tokens, vocab_size)
        alone = dict(args.options, enable_prefix_caching=False)
        ((_, expected),) = compute(model, {"alone": dict(size=1)}, alone, prompts, params)
        ways = {name: WAYS[name] for name in args.only}
        for name, found in compute(model, ways, args.options, prompts, params):
            equal = sum(one == other for one, other in zip(expected, found, strict=True))
            tokens = sum(one[0] == other[0] for one, other in zip(expected, found, strict=True))
            print(
                f"{name:20} equal: {equal} of {len(prompts)}, in their tokens: {tokens}", flush=True
            )


if __name__ == "__main__":
    main()
