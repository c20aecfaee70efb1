"""Compare this checkout with another one: an engine of each, at the same time, in turns.

    python benchmarks/turns.py DIR [--shape qwen3-8b] [--num-seqs 1 32 256] [--rounds 5]
        [--max-len 1024] [--layers 12] [--head] [--options '{"kv_cache_dtype": "fp8"}']
        [--task prefill|embed|constrained|adapters]

Both engines have the same random weights and requests, and stay until the end, so that a turn costs
what it computes. Each round times both, and the other one first than in the round before. A line
for each number of requests has the median of the other's seconds divided by ours, which is above 1
if this checkout is faster, and the least and the most of it; the last line is JSON.

On a GPU both must fit: `num_kvcache_blocks` gives both the same room. `--layers` makes the model
shorter, and `--head` adds an EAGLE-3 head with wrong drafts. `--task`: one token of each prompt,
its vector, text that a regular expression narrows, or requests of eight adapters.
"""

import argparse
import itertools
import json
import os
import statistics
import string
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENGINE = """
import json, sys, time
if __name__ == "__main__":  # ranks import this file
    from nanovllm import LLM, SamplingParams
    model, options, task = sys.argv[1:4]
    llm = LLM(model, load_format="dummy", **json.loads(options))
    more = {"structured_outputs": {"regex": "[a-m]+( [a-m]+)*"}} if task == "constrained" else {}
    print("ready", flush=True)
    for line in sys.stdin:
        prompts, lengths, temperature = json.loads(line)
        params = [
            SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n, **more)
            for n in ([1] * len(lengths) if task == "prefill" else lengths)
        ]
        adapters = None
        if task == "adapters":
            from nanovllm.lora_request import LoRARequest
            adapters = [
                LoRARequest(f"adapter{i % 8}", i % 8 + 1, f"{model}/adapter{i % 8}")
                for i in range(len(prompts))
            ]
        start = time.perf_counter()
        if task == "embed":
            llm.embed(prompts, use_tqdm=False)
        else:
            llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
        print(time.perf_counter() - start, flush=True)
    llm.close()
"""
TASKS = ("generate", "prefill", "embed", "constrained", "adapters")


class Engine:
    """An engine of a checkout, in a process of its own."""

    def __init__(self, checkout: Path, model: str, options: str, task: str, script: Path) -> None:
        script.write_text(ENGINE)
        self._process = subprocess.Popen(
            [sys.executable, str(script), model, options, task], text=True,
            env=os.environ | {"PYTHONPATH": str(checkout.resolve())},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._read()

    def seconds(self, request: str) -> float:
        """What a request takes; see `ENGINE`."""
        assert self._process.stdin is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        raise SystemExit(f"an engine ended with status {self._process.wait()}")


def compare(engines: list[Engine], args: argparse.Namespace, num_seqs: int) -> dict[str, Any]:
    """Rounds after one that is not counted. No prompt is one of another round, or number."""
    from nanovllm.bench.workload import WorkloadOptions, draw_workload

    longest = dict(max_input_len=args.max_len, max_output_len=args.max_len)
    drawn = draw_workload(
        WorkloadOptions(num_seqs=num_seqs, seed=num_seqs, **longest), args.vocab_size
    )
    seconds: list[list[float]] = [[], []]
    for number in range(args.rounds + 1):
        prompts = [[(t + number) % args.vocab_size for t in prompt] for prompt in drawn.prompts]
        request = json.dumps([prompts, drawn.output_lens, args.temperature])
        for index in (0, 1) if number % 2 else (1, 0):
            seconds[index].append(engines[index].seconds(request))
    ours, theirs = seconds[0][1:], seconds[1][1:]
    ratios = [other / own for own, other in zip(ours, theirs, strict=True)]
    median = statistics.median(ratios)
    print(
        f"{num_seqs:5d} requests: {median:.3f} ({min(ratios):.3f} to {max(ratios):.3f}),"
        f" {sum(drawn.output_lens) / statistics.median(ours):,.0f} tok/s",
        flush=True,
    )
    return {"num_seqs": num_seqs, "ratio": median, "ours": ours, "theirs": theirs}


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write a tokenizer of bytes and of words of four letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = map("".join, itertools.product(string.ascii_lowercase, repeat=4))
    texts = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *itertools.islice(words, vocab_size)]
    vocab = {text: number for number, text in enumerate(texts[: vocab_size - 1])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>").save_pretrained(path)


def write_adapter(path: Path, config: dict[str, Any], rank: int = 16) -> None:
    """Write an adapter of zeros for the linear layers of attention."""
    import torch
    from safetensors.torch import save_file

    hidden, head_dim = config["hidden_size"], config["head_dim"]
    of_queries, of_keys = (
        config[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads")
    )
    sizes = {
        "q_proj": (of_queries, hidden), "k_proj": (of_keys, hidden), "v_proj": (of_keys, hidden),
        "o_proj": (hidden, of_queries),
    }  # fmt: skip
    tensors = {}
    for layer, (name, (size_out, size_in)) in itertools.product(
        range(config["num_hidden_layers"]), sizes.items()
    ):
        start = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[f"{start}.lora_A.weight"] = torch.zeros(rank, size_in, dtype=torch.bfloat16)
        tensors[f"{start}.lora_B.weight"] = torch.zeros(size_out, rank, dtype=torch.bfloat16)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*sizes]}
    (path / "adapter_config.json").write_text(json.dumps(fields))


def main() -> None:
    """Print a line for each number of requests, and one of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("against", type=Path, metavar="DIR")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--task", choices=TASKS, default=TASKS[0])
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from nanovllm.bench.shapes import write_shape

    with TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("model", "head")]
        for path, is_head in zip(paths, (False, True), strict=True):
            path.mkdir()
            write_shape(args.shape, path, is_head)
        file = paths[0] / "config.json"
        config = json.loads(file.read_text())
        if args.layers:
            config["num_hidden_layers"] = args.layers
            file.write_text(json.dumps(config))
        args.vocab_size = config["vocab_size"]
        options = {"max_model_len": 2 * args.max_len, **args.options}
        if args.head:
            head = {"method": "eagle3", "model": str(paths[1]), "num_speculative_tokens": 3}
            options["speculative_config"] = head
        if args.task == "constrained":
            write_tokenizer(paths[0], args.vocab_size)
        if args.task == "adapters":
            options["enable_lora"] = True
            for index in range(8):
                write_adapter(paths[0] / f"adapter{index}", config)
        given = str(paths[0]), json.dumps(options), args.task
        engines = [
            Engine(checkout, *given, Path(folder, f"engine{index}.py"))
            for index, checkout in enumerate((ROOT, args.against))
        ]
        results = [compare(engines, args, num_seqs) for num_seqs in args.num_seqs]
        for engine in engines:
            engine.close()
    asked = {"shape": args.shape, "task": args.task, "options": args.options}
    print(json.dumps(asked | {"results": results}))


if __name__ == "__main__":
    main()
