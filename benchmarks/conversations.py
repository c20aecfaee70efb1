"""How many tokens conversations compute, and how many are the least possible; without a model.

    python benchmarks/conversations.py [--num-checkpoints 400 140 70] [--kinds hybrid alone kv]

Conversations share a few system prompts, and take turns: in each round all of them ask at once, in
random order, with all that was said before. Requests run through the scheduler, with steps that
overlap as on a GPU; answers are drawn beforehand.

The least possible: each request begins at the last block boundary up to which its tokens were
computed by a request before it. `ratio` is the number of computed tokens divided by that. A model
of kind "hybrid" has states and KV, "alone" only states, "kv" only KV. The pool has room for all KV.
"""

import argparse
import json
import random
from collections.abc import Iterator
from typing import NamedTuple

from nanovllm.config import Config
from nanovllm.engine.cache.caches import CacheLayout
from nanovllm.engine.cache.state_slots import StateLayout
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.scheduler import Scheduler
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

VOCAB = 50_000
STOP = VOCAB  # ends each answer
KINDS = ("hybrid", "alone", "kv")


class Workload(NamedTuple):
    """The numbers of a workload; lengths are in tokens, the least and the most."""

    num_conversations: int = 100
    num_turns: int = 10
    num_systems: int = 5
    system: tuple[int, int] = (500, 1000)
    turn: tuple[int, int] = (20, 60)
    answer: tuple[int, int] = (20, 60)


class Engine(NamedTuple):
    """The options of the scheduler, and what the model keeps."""

    kind: str = "hybrid"
    num_checkpoints: int = 400
    interval: int = 2048
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 8192
    num_blocks: int = 20_000

    def scheduler(self) -> Scheduler:
        """A scheduler with empty caches."""
        config = Config(
            "no model", kvcache_block_size=self.block_size, max_num_seqs=self.max_num_seqs,
            overlap=True, max_num_batched_tokens=self.max_num_batched_tokens,
        )  # fmt: skip
        length = self.num_blocks * self.block_size
        settled = EngineConfig.settle(config, self.num_blocks, max_model_len=length)
        states = StateLayout(1, self.num_checkpoints, self.interval)
        windows = () if self.kind == "alone" else (None,)
        return Scheduler(settled, CacheLayout(windows, None if self.kind == "kv" else states))


class Least:
    """Counts the tokens that requests must compute, one after another."""

    def __init__(self, block_size: int) -> None:
        self.block_size, self.num_tokens = block_size, 0
        self._known: set[int] = set()  # hashes of beginnings that end with a block

    def add(self, prompt: list[int], answer: list[int]) -> None:
        """Count a request's tokens. Steps that overlap also compute the last one of an answer."""
        tokens = prompt + answer
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        hashes = [hash(tuple(tokens[:end])) for end in ends]
        skippable = hashes[: (len(prompt) - 1) // self.block_size]
        shared = next((i for i, h in enumerate(skippable) if h not in self._known), len(skippable))
        self.num_tokens += len(tokens) - shared * self.block_size
        self._known.update(hashes)


def rounds(workload: Workload, seed: int) -> Iterator[list[tuple[list[int], list[int]]]]:
    """The prompts and answers of each round, in the order of arrival."""
    rng = random.Random(seed)

    def text(least: int, most: int) -> list[int]:
        return rng.choices(range(VOCAB), k=rng.randint(least, most))

    systems = [text(*workload.system) for _ in range(workload.num_systems)]
    said = [list(systems[i % len(systems)]) for i in range(workload.num_conversations)]
    for _ in range(workload.num_turns):
        asked = []
        for number in rng.sample(range(len(said)), len(said)):
            prompt = said[number] + text(*workload.turn)
            answer = [*text(*workload.answer)[1:], STOP]
            said[number] = prompt + answer
            asked.append((prompt, answer))
        yield asked


def run(scheduler: Scheduler, asked: list[tuple[list[int], list[int]]]) -> int:
    """Run the requests of a round; returns how many tokens were computed."""
    answers: dict[Sequence, list[int]] = {}
    for prompt, answer in asked:
        params = SamplingParams(max_tokens=1000, stop_token_ids=[STOP])
        seq = Sequence(prompt, params)
        answers[seq] = answer
        scheduler.add(seq)
    num_tokens, before = 0, None

    def draw(batch: Batch) -> list[int]:
        tokens = []
        for seq in batch.sampling_seqs:
            place = seq.num_known_tokens - seq.num_prompt_tokens
            answer = answers[seq]
            tokens.append(answer[min(place, len(answer) - 1)])
        return tokens

    while not scheduler.is_finished():
        batch = scheduler.schedule()
        if batch is not None:
            num_tokens += sum(seq.num_scheduled_tokens for seq in batch.seqs)
            scheduler.advance(batch)
        if before is not None:
            scheduler.postprocess(before, draw(before))
        before = batch
    return num_tokens


def compare(workload: Workload, engine: Engine, seed: int = 0) -> dict[str, float]:
    """The tokens that a workload computes, the least possible, and the ratio."""
    scheduler, least, computed = engine.scheduler(), Least(engine.block_size), 0
    for asked in rounds(workload, seed):
        computed += run(scheduler, asked)
        for prompt, answer in asked:
            least.add(prompt, answer)
    ratio = round(computed / least.num_tokens, 3)
    return {"computed": computed, "least": least.num_tokens, "ratio": ratio}


def main() -> None:
    """Print a line for each kind of model and each number of checkpoints, and one of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--num-checkpoints", type=int, nargs="+", default=[400, 140, 70])
    parser.add_argument("--interval", type=int, default=Engine().interval)
    parser.add_argument("--block-size", type=int, default=Engine().block_size)
    parser.add_argument("--num-conversations", type=int, default=100)
    parser.add_argument("--num-turns", type=int, default=10)
    args = parser.parse_args()
    workload = Workload(args.num_conversations, args.num_turns)
    results = []
    for kind in args.kinds:
        for number in args.num_checkpoints if kind != "kv" else [0]:
            engine = Engine(kind, number, args.interval, args.block_size)
            figures = compare(workload, engine)
            results.append({"kind": kind, "num_checkpoints": number, **figures})
            print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    asked = {"benchmark": "conversations", **workload._asdict(), "interval": args.interval}
    print(json.dumps(asked | {"block_size": args.block_size, "results": results}))


if __name__ == "__main__":
    main()
