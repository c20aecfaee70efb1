"""The host's time in a decode step, by phase, without the device's work.

    python benchmarks/host.py [--num-seqs 1 64 256 1024] [--against DIR]

Runs the real engine through `LLM.step`. A stand-in replaces the decode graph, or model and sampler
if the batch is too large for graphs: it computes nothing and returns fixed ids. The rest is the
host's time between two decode steps, in microseconds:

    schedule     Scheduler.schedule
    prepare      from the batch to the arrays for the device
    launch       the stand-ins, in place of kernels and graphs, and the handling of their results
    read         from the sampled ids as a tensor to a list
    postprocess  Scheduler.postprocess, and the engine's other work after a step

With `--overlap`, a step schedules, prepares and launches the next one before it reads its own
tokens. The phases before `read` then run while the device computes.

The benchmark runs on the CPU, where an upload copies nothing and nothing waits. On a GPU, `prepare`
also pins and copies memory (about 20 microseconds if there is anything to upload), and `read` waits
for the step.

`--against DIR` names a checkout of the nano-vllm project. Its phases are timed too, in turn with
ours: its scheduler, and its model runner's preparation if the checkout has that file, also without
copies to the GPU. Phases that it lacks are left blank.
"""

import argparse
import ast
import gc
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from scheduler_step import RIVAL, load_rival, rival_scheduler

from nanovllm import LLM, SamplingParams
from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.decode import Decoded
from nanovllm.engine.schedule.batch import Size
from nanovllm.kernels.plain.read_table import Decoding

PHASES = ("schedule", "prepare", "launch", "read", "postprocess")
PROMPT_LEN = 100  # of the first prompt; each is one token longer than the one before
VOCAB_SIZE = 32_000
WARMUP_STEPS = 5
SPARE_TOKENS = 8  # above the number of steps: no sequence finishes during the measurement
MAX_TOKENS = 16_384  # of a prefill step: few decode steps run before all have begun
FIXED_ID = 7  # the token id of prompts and samples

Laps = dict[str, float]  # seconds of a step by phase
Step = Callable[[], Laps]


class Clock:
    """Measures the time of each phase of a step; `lap` names the phase that has just ended."""

    def __init__(self) -> None:
        self.laps: Laps = {}
        self.last = 0.0

    def start(self) -> None:
        """Start a step."""
        self.laps = dict.fromkeys(PHASES, 0.0)
        self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Add the time since the last call to `phase`."""
        now = time.perf_counter()
        self.laps[phase] += now - self.last
        self.last = now

    def ends(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function`: `phase` ends when it returns."""

        def timed(*args: Any) -> Any:
            result = function(*args)
            self.lap(phase)
            return result

        return timed


class StandIn:
    """A model and a sampler that compute nothing. `prepare` ends when one of them is called."""

    def __init__(self, clock: Clock, num_tokens: int) -> None:
        self.clock = clock
        self.hidden = torch.zeros(num_tokens, 1)
        self.token_ids = torch.full((num_tokens,), FIXED_ID)
        self.rows = torch.arange(num_tokens)

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,  # noqa: ARG002
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        self.clock.lap("prepare")
        hidden = self.hidden[: len(input_ids if rows is None else rows)]
        self.clock.lap("launch")
        return hidden, []

    def decode(self, size: Size, *_: Any) -> Decoded:
        self.clock.lap("prepare")
        rows = self.rows[: size.num_rows]
        decoding = Decoding(*[rows] * len(Decoding._fields))
        result = Decoded(self.hidden[: size.num_rows], decoding, {})
        self.clock.lap("launch")
        return result

    def replay(self, size: Size, out: torch.Tensor) -> Computed:
        self.clock.lap("prepare")
        return Computed(out, self.rows, (self.rows, self.rows), self.token_ids[: size.num_rows])

    def compute_logits(self, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        return hidden

    def sample(self, logits: torch.Tensor, *_: Any) -> torch.Tensor:
        self.clock.lap("prepare")
        token_ids = self.token_ids[: len(logits)]
        self.clock.lap("launch")
        return token_ids


def prompts(num_seqs: int) -> list[list[int]]:
    """Prompts without common prefixes; each is one token longer than the one before."""
    return [[index + 1] + [FIXED_ID] * (PROMPT_LEN + index - 1) for index in range(num_seqs)]


def max_length(num_seqs: int, num_steps: int) -> int:
    """A length that no sequence reaches."""
    return PROMPT_LEN + num_seqs + num_steps + SPARE_TOKENS


def pool_blocks(num_seqs: int, num_steps: int, block_size: int) -> int:
    """Blocks for all sequences at their full length: no sequence is preempted."""
    return num_seqs * -(-max_length(num_seqs, num_steps) // block_size)


def write_model(path: Path, max_len: int) -> None:
    """Write the config of the smallest model that the engine accepts. Its layers never run."""
    config = dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_act="silu", hidden_size=16,
        intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=16, vocab_size=VOCAB_SIZE, tie_word_embeddings=True, rms_norm_eps=1e-6,
        max_position_embeddings=max_len, rope_theta=10_000, torch_dtype="float32",
    )  # fmt: skip
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")


def our_step(num_seqs: int, num_steps: int, block_size: int, **options: Any) -> Step:
    """Prefill our engine, and return its decode step."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), max_length(num_seqs, num_steps))
        llm = LLM(
            folder, device="cpu", load_format="dummy", max_num_seqs=num_seqs,
            scheduling="prefill-first", kvcache_block_size=block_size,
            max_num_batched_tokens=MAX_TOKENS,
            num_kvcache_blocks=pool_blocks(num_seqs, num_steps, block_size), **options,
        )  # fmt: skip
    clock = Clock()
    replace_device_work(llm, clock)
    params = SamplingParams(max_tokens=num_steps + SPARE_TOKENS, ignore_eos=True)
    for prompt in prompts(num_seqs):
        llm.add_request(prompt, params)

    def step() -> Laps:
        clock.start()
        llm.step()
        clock.lap("postprocess")
        return clock.laps

    while not llm.stats()["decode_tokens"] or llm.stats()["num_running"] < num_seqs:
        step()
    return step


def replace_device_work(llm: LLM, clock: Clock) -> None:
    """Replace the device's work by stand-ins, and time the phases of a step."""
    runner, shard, scheduler = llm.model_runner, llm.model_runner.shard, llm.scheduler
    stand_in: Any = StandIn(clock, llm.config.max_num_batched_tokens)
    shard.forward.model, shard.draws.sampler = stand_in, stand_in.sample
    shard.backend.attention.plan = lambda context: None  # type: ignore[method-assign]  # noqa: ARG005
    shard.decodes.decode = stand_in.decode  # type: ignore[method-assign]
    shard.graphs = graphs = shard.decode_graphs(llm.config.max_num_running)
    graphs.step = stand_in.replay  # type: ignore[method-assign, assignment]
    draw: Any = clock.ends("launch", runner.draw)

    def draw_and_read(*args: Any) -> Any:
        launched = draw(*args)
        wait = launched.wait

        def timed_wait() -> Any:
            clock.lap("postprocess")  # the engine's work since the launch
            token_ids = wait()
            clock.lap("read")
            return token_ids

        launched.wait = timed_wait
        return launched

    runner.begin = clock.ends("launch", runner.begin)  # type: ignore[method-assign]
    runner.draw = draw_and_read  # type: ignore[method-assign, assignment]
    scheduler.schedule = clock.ends("schedule", scheduler.schedule)  # type: ignore[method-assign]


class Stub(types.ModuleType):
    """A module that has every name, for names that are imported but never called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


def load_preparation(checkout: Path) -> types.ModuleType | None:
    """Load the other engine's model runner without model and kernels; None if there is none."""
    folder = checkout / "nanovllm"
    if not (folder / "engine/model_runner.py").exists():
        return None

    def load(name: str) -> types.ModuleType:
        path = folder / f"{name.replace('.', '/')}.py"
        source = path.read_text(encoding="utf-8").replace("from nanovllm.", f"from {RIVAL}.")
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{RIVAL}."):
                parent, _, _ = str(node.module).rpartition(".")
                sys.modules.setdefault(parent, Stub(parent))
                sys.modules.setdefault(str(node.module), Stub(str(node.module)))
        module = types.ModuleType(f"{RIVAL}.{name}")
        sys.modules[module.__name__] = module
        exec(compile(tree, str(path), "exec"), module.__dict__)
        return module

    sys.modules.setdefault(f"{RIVAL}.utils", Stub(f"{RIVAL}.utils"))
    load("utils.context")
    return load("engine.model_runner")


class NoCopies:
    """PyTorch for the other engine's preparation, without copies to a device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(data: Any, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype)


def rival_decode(
    preparation: types.ModuleType, clock: Clock, num_seqs: int, block_size: int
) -> Callable[[list[Any]], list[int]]:
    """The other engine's work between scheduling and postprocessing: sequences to token ids."""
    stand_in = StandIn(clock, num_seqs)
    runner = object.__new__(preparation.ModelRunner)
    runner.block_size, runner.rank, runner.device = block_size, 0, torch.device("cpu")
    preparation.torch = NoCopies()  # type: ignore[attr-defined]
    torch.Tensor.cuda = lambda self, **_: self  # type: ignore[method-assign]

    def decode(seqs: list[Any]) -> list[int]:
        input_ids, positions = runner.prepare_decode(seqs)
        temperatures = runner.prepare_sample(seqs)
        hidden, _ = stand_in(input_ids, positions)
        token_ids: list[int] = stand_in.sample(hidden, temperatures).tolist()
        preparation.reset_context()
        clock.lap("read")
        return token_ids

    return decode


def rival_step(
    modules: dict[str, types.ModuleType], preparation: types.ModuleType | None,
    num_seqs: int, num_steps: int, block_size: int,
) -> Step:  # fmt: skip
    """Prefill the other engine's scheduler, and return its decode step."""
    num_blocks = pool_blocks(num_seqs, num_steps, block_size)
    scheduler, book = rival_scheduler(modules, num_seqs, block_size, num_blocks)
    sequence = modules["engine.sequence"].Sequence
    params = modules["sampling_params"].SamplingParams(
        max_tokens=num_steps + SPARE_TOKENS, ignore_eos=True
    )
    for prompt in prompts(num_seqs):
        scheduler.add(sequence(prompt, params))
    clock = Clock()
    decode = rival_decode(preparation, clock, num_seqs, block_size) if preparation else None

    def step() -> Laps:
        clock.start()
        seqs, is_prefill = scheduler.schedule()
        clock.lap("schedule")
        if decode is not None and not is_prefill:
            token_ids = decode(seqs)
        else:
            token_ids = [FIXED_ID] * len(seqs)
            clock.last = time.perf_counter()
        book(seqs, token_ids, is_prefill)
        clock.lap("postprocess")
        return clock.laps

    while scheduler.waiting:
        step()
    return step


def microseconds(steps: dict[str, Step], num_steps: int) -> dict[str, dict[str, float]]:
    """Medians by phase. The engines take turns, so that a busy machine slows both alike."""
    laps: dict[str, list[Laps]] = {name: [] for name in steps}
    gc.collect()
    for _ in range(num_steps):
        for name, step in steps.items():
            laps[name].append(step())
    rows = {}
    for name, all_laps in laps.items():
        kept = all_laps[WARMUP_STEPS:]
        rows[name] = {phase: statistics.median(lap[phase] for lap in kept) for phase in PHASES}
        rows[name]["total"] = statistics.median(sum(lap.values()) for lap in kept)
    return {
        name: {phase: round(1e6 * seconds, 1) for phase, seconds in row.items()}
        for name, row in rows.items()
    }


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 64, 256, 1024], metavar="N")
    parser.add_argument("--num-steps", type=int, default=300, metavar="N")
    parser.add_argument("--block-size", type=int, default=256, metavar="N")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction,
                        help="launch a step before the last one's tokens are read")  # fmt: skip
    parser.add_argument("--against", type=Path, metavar="DIR", help="a checkout of nano-vllm")
    return parser.parse_args()


def describe(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """The machine and the options of a run, for its JSON line."""
    processor = platform.processor() or platform.machine()
    return {
        "benchmark": "host",
        "machine": f"{processor}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "torch": torch.__version__,
        "num_steps": args.num_steps,
        "block_size": args.block_size,
        "options": options,
        "unit": "us per decode step, medians",
    }


def main() -> None:
    """Measure each number of sequences; print a table and one JSON line."""
    args = parse_args()
    logging.getLogger("nanovllm").setLevel(logging.ERROR)  # no warning that there is no tokenizer
    rival = load_rival(args.against) if args.against else None
    preparation = load_preparation(args.against) if args.against else None
    options = {} if args.overlap is None else {"overlap": args.overlap}
    columns = (*PHASES, "total")
    result = describe(args, options) | {"num_seqs": {}}
    print(f"us per decode step, medians of {args.num_steps}, block size {args.block_size}")
    print(f"{'sequences':>9} {'':10}" + "".join(f" {column:>11}" for column in columns))
    for num_seqs in args.num_seqs:
        num_steps = args.num_steps + WARMUP_STEPS
        workload = (num_seqs, num_steps, args.block_size)
        steps = {"nanovllm": our_step(*workload, **options)}
        if rival:
            steps["nano-vllm"] = rival_step(rival, preparation, *workload)
        figures: dict[str, Any] = microseconds(steps, num_steps)
        if rival and preparation is None:
            figures["nano-vllm"] |= dict.fromkeys(("prepare", "launch", "read", "total"))
        for name, row in figures.items():
            cells = ("" if row[column] is None else f"{row[column]:.1f}" for column in columns)
            print(f"{num_seqs:>9} {name:10}" + "".join(f" {cell:>11}" for cell in cells))
        result["num_seqs"][num_seqs] = figures
    print(json.dumps(result))


if __name__ == "__main__":
    main()
