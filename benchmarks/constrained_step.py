"""The host's time in decode steps with constrained rows, without a model.

    python benchmarks/constrained_step.py [--rows 256] [--vocab 151936] [--steps 60]

Sequences follow JSON texts of random values through the real scheduler and the real preparation of
draws. Their tokens are known beforehand, and other inputs are where a GPU has them. A line of JSON
for each case, with the medians of all steps in microseconds:

    postprocess  the tokens of a step: constraints, texts and stops are followed
    draw         what the next draw needs: masks are filled
    fill         the part of `draw` that is in `Masks.fill`
    serial       postprocess and draw: what is between a step's tokens and the next draw
    thread       the part of `serial` in which the engine's thread computes: Python's, most of it,
                 while llguidance's is that of other threads

On a busy machine times vary, and those of `thread` least: compare the least of several runs.
"""

import argparse
import json
import random
import statistics
import string
import time
from collections.abc import Callable
from typing import Any

import torch
from constraints import SCHEMA, elapsed, make_tokenizer

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.requests.stop_text import TextUntilStop
from nanovllm.engine.run import draw_inputs as drawing
from nanovllm.engine.run import narrowing
from nanovllm.engine.run.computed import Computed
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.parts import SequenceParts
from nanovllm.engine.schedule.scheduler import Scheduler
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.structured.grammars import Grammars
from nanovllm.structured.masks import Masks

BLOCK_SIZE = 256
MEDIA = ("book", "film", "game", "song")  # each makes another schema

Options = dict[str, Any]
CASES: dict[str, tuple[int, Options]] = {  # how many schemas there are, and other parameters
    "no constraint": (0, {}),
    "no constraint, a stop": (0, dict(stop=["@@"])),
    "4 schemas": (4, {}),
    "4 schemas, ignore_eos": (4, dict(ignore_eos=True)),
    "4 schemas, a stop": (4, dict(stop=["@@"])),
    "1 schema": (1, {}),
}


def schema(medium: str) -> dict[str, Any]:
    """A list of objects."""
    properties = {**SCHEMA["properties"], "medium": {"const": medium}}
    return {"type": "array", "items": {**SCHEMA, "properties": properties}}


def text(rng: random.Random, medium: str) -> str:
    """A list of random objects as JSON."""

    def words() -> str:
        number = rng.randint(1, 4)
        return " ".join("".join(rng.choices(string.ascii_lowercase, k=5)) for _ in range(number))

    values = [
        {
            "name": words(), "age": rng.randint(0, 99), "tags": [words(), words()], "kind": "bb",
            "address": {"street": words(), "zip": "12345"}, "medium": medium,
        }
        for _ in range(20)
    ]  # fmt: skip
    return json.dumps(values)


def sequences(
    tokenizer: Any, grammars: Grammars, rows: int, num_schemas: int, options: Options
) -> list[tuple[Sequence, list[int]]]:
    """Sequences, and the tokens that each will have."""
    rng = random.Random(0)
    found = []
    for row in range(rows):
        medium = MEDIA[row % max(1, num_schemas)]
        given = dict(options)
        if num_schemas:
            given["structured_outputs"] = dict(json=schema(medium))
        params = SamplingParams(max_tokens=1000, **given)
        ends = frozenset() if params.ignore_eos else frozenset({tokenizer.eos_token_id})
        constraint = None
        if params.structured_outputs is not None:
            constraint = grammars.constraint(params.structured_outputs, ends).copy()
        followed = TextUntilStop(tokenizer, params) if params.stop else None
        parts = SequenceParts(constraint=constraint, text=followed)
        seq = Sequence([row, 0], params, eos_token_ids=ends, parts=parts)
        found.append((seq, tokenizer.encode(text(rng, medium))))
    return found


def timed(
    function: Callable[..., Any], times: list[float], own: list[float] | None = None
) -> Callable[..., Any]:
    """The function, which adds its times, and to `own` those in which its thread computed."""

    def run(*args: Any) -> Any:
        start, computed = time.perf_counter(), time.thread_time()
        result = function(*args)
        if own is not None:
            own.append((time.thread_time() - computed) * 1e6)
        times.append(elapsed(start))
        return result

    return run


def measure(found: list[tuple[Sequence, list[int]]], steps: int, vocab: int) -> dict[str, float]:
    """The medians of the parts of a step."""
    config = Config(
        "no model", overlap=False, kvcache_block_size=BLOCK_SIZE, max_num_seqs=512,
        max_num_batched_tokens=16384,
    )  # fmt: skip
    scheduler = Scheduler(EngineConfig.settle(config, 4 * len(found), 1024))
    for seq, _ in found:
        scheduler.add(seq)
    tokens = dict(found)
    times: dict[str, list[float]] = {name: [] for name in ("postprocess", "draw", "fill")}
    own: dict[str, list[float]] = {"postprocess": [], "draw": []}
    fill = Masks.fill
    Masks.fill = timed(fill, times["fill"])
    draw = timed(drawing.draw_inputs, times["draw"], own["draw"])

    def follow(batch: Batch, token_ids: list[int]) -> list[Sequence]:
        return scheduler.postprocess(batch, token_ids)

    postprocess = timed(follow, times["postprocess"], own["postprocess"])
    known = torch.zeros(len(found))  # whatever the device has
    computed = Computed(known[:, None], known, (known, known), known)
    for step in range(steps):
        batch = scheduler.schedule()
        assert batch is not None and len(batch.sampling_seqs) == len(found)
        draw(batch.sampling_seqs, vocab, "cpu", computed)
        scheduler.advance(batch)
        assert not postprocess(batch, [tokens[seq][step] for seq in batch.sampling_seqs])
    Masks.fill = fill
    figures = {name: statistics.median(each[5:]) for name, each in times.items() if each}
    for name, parts in (("serial", times), ("thread", own)):
        pairs = zip(parts["postprocess"][5:], parts["draw"][6:], strict=False)
        figures[name] = statistics.median(map(sum, pairs))
    return figures


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    narrowing.NARROWED_LOGITS["cpu"] = narrowing.NARROWED_LOGITS["cuda"]
    tokenizer = make_tokenizer(options.vocab - 300)  # as many as Qwen3 has
    grammars = Grammars(tokenizer, options.vocab, [tokenizer.eos_token_id])
    for name, (num_schemas, given) in CASES.items():
        found = sequences(tokenizer, grammars, options.rows, num_schemas, given)
        figures = measure(found, options.steps, options.vocab)
        print(json.dumps({"case": name} | {part: round(us) for part, us in figures.items()}))


if __name__ == "__main__":
    main()
