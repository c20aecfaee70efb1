"""Compare several engines on one workload: find them, run them in turns, and print the figures.

Each engine runs `benchmarks/peer.py` in a new process for each round, with the Python that has the
engine. All engines get the same prompts (as token ids), output lengths and model directory, in a
JSON file. Only one of these processes runs at a time.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = Path(__file__).with_name("peer.py")
OURS = "nanovllm"
PEERS = {"nano-vllm": "nanovllm", "vllm": "vllm", "transformers": "transformers"}  # their packages
ROUNDS = 3
LAST_LINES = 12  # of a failed engine's stderr, to show
FIND = """
import importlib.util, sys
spec = importlib.util.find_spec(sys.argv[1])
print(spec.origin) if spec and spec.origin else sys.exit(1)
"""


@dataclass(frozen=True)
class Engine:
    """An engine: its package, the Python that runs it, and a folder to import it from."""

    name: str
    module: str
    python: str = sys.executable
    path: str | None = None

    def env(self) -> dict[str, str]:
        """Its environment, in which Python searches the folder first."""
        path = filter(None, [self.path, os.environ.get("PYTHONPATH")])
        return os.environ | {"PYTHONPATH": os.pathsep.join(path)}

    def find(self) -> Path | None:
        """The file of the package that its Python finds, or None. Starts that Python."""
        found = subprocess.run(
            [self.python, "-c", FIND, self.module],
            cwd=PROGRAM.parent, env=self.env(), capture_output=True, text=True,
        )  # fmt: skip
        return Path(found.stdout.strip()) if found.returncode == 0 else None


class PeerError(Exception):
    """An engine has failed; the message has the last lines of its stderr."""


def pairs(option: str, values: list[str]) -> dict[str, str]:
    """Parse NAME=VALUE, where NAME is a peer."""
    parsed = {}
    for text in values:
        name, sign, value = text.partition("=")
        if name not in PEERS or not sign or not value:
            names = ", ".join(PEERS)
            raise ValueError(f"{option} must be NAME=PATH with a NAME of {names}, got {text!r}")
        parsed[name] = value
    return parsed


def program(name: str) -> str:
    """The absolute path of a program. Links are kept: a virtual environment's Python is one."""
    found = shutil.which(os.path.expanduser(name))  # noqa: PTH111 - a Path drops the dot of ./
    if found is None:
        raise FileNotFoundError(f"--peer-python {name} is not a program")
    return str(Path(found).absolute())


def folder(name: str) -> str:
    """The absolute path of a folder."""
    path = Path(name).expanduser().absolute()
    if not path.is_dir():
        raise NotADirectoryError(f"--peer-path {name} is not a directory")
    return str(path)


def find_engines(names: list[str], pythons: list[str], paths: list[str]) -> list[Engine]:
    """Our engine and the requested peers; without names, the peers that are found.

    A peer that is requested by name, Python or path but not found is a ValueError.
    """
    python_of = {name: program(it) for name, it in pairs("--peer-python", pythons).items()}
    path_of = {name: folder(it) for name, it in pairs("--peer-path", paths).items()}
    if unknown := sorted(set(names) - PEERS.keys()):
        raise ValueError(f"--peers are {', '.join(PEERS)}; got {', '.join(unknown)}")
    requested = {*names, *python_of, *path_of}
    engines = [Engine(OURS, OURS, path=str(ROOT))]
    for name, module in PEERS.items():
        if names and name not in requested:
            continue
        engine = Engine(name, module, python_of.get(name, sys.executable), path_of.get(name))
        file = engine.find()
        if file is not None and not file.is_relative_to(ROOT / OURS):
            engines.append(engine)
        elif name in requested:
            where = f"{engine.python}{f' with {engine.path}' if engine.path else ''}"
            what = f"finds no package {module!r}" if file is None else "finds this project itself"
            raise ValueError(f"{name}: {where} {what}; give --peer-path {name}=DIR or --peer-python"
                             f" {name}=PATH")  # fmt: skip
    return engines


def write_weights(path: Path, dtype: str, seed: int) -> None:
    """Add random weights to a directory with a config.json, and a tokenizer with a word per token.

    Peak memory: the model.
    """
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    file = path / "config.json"
    text = json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"torch_dtype": dtype})
    file.write_text(text, encoding="utf-8")
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(path)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    file.write_text(
        text, encoding="utf-8"
    )  # restore the form that all versions of transformers read
    words = {f"t{i}": i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


def visible_devices(device: torch.device, num_ranks: int) -> dict[str, str]:
    """The environment that makes only `device` and the GPUs of the further ranks visible."""
    if device.type != "cuda":
        return {}
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    seen = seen or [str(index) for index in range(torch.cuda.device_count())]
    first = device.index or 0
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen[first : first + num_ranks])}


def run_engine(engine: Engine, folder: Path, env: dict[str, str]) -> dict[str, Any]:
    """One run in a new process. When it ends in any way, all processes that it started are killed.

    Output goes to files: with pipes, a grandchild that keeps one open would be waited for.
    """
    out, err = folder / f"{engine.name}.out", folder / f"{engine.name}.err"
    command = [engine.python, str(PROGRAM), str(folder / f"{engine.name}.json")]
    with out.open("w") as stdout, err.open("w") as stderr:
        child = subprocess.Popen(
            command, env=engine.env() | env, stdout=stdout, stderr=stderr,
            stdin=subprocess.DEVNULL, cwd=folder, start_new_session=True,
        )  # fmt: skip
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            status = child.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    try:
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    except ValueError:
        lines = err.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        ended = f"signal {-status}" if status < 0 else f"status {status}"
        raise PeerError("\n".join([f"ended with {ended}", *lines])) from None
    return result


@dataclass
class Runs:
    """The results of an engine's rounds."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None


def take_turns(
    engines: list[Engine], jobs: dict[str, dict[str, Any]], rounds: int, env: dict[str, str]
) -> dict[str, Runs]:
    """Run the rounds, each starting with another engine. A failed engine is not run again."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, job in jobs.items():
            (Path(scratch) / f"{name}.json").write_text(json.dumps(job), encoding="utf-8")
        return _rounds(engines, rounds, Path(scratch), env)


def _rounds(
    engines: list[Engine], rounds: int, folder: Path, env: dict[str, str]
) -> dict[str, Runs]:
    runs = {engine.name: Runs() for engine in engines}
    for index in range(rounds):
        first = index % len(engines)
        for engine in engines[first:] + engines[:first]:
            its = runs[engine.name]
            if its.error is not None:
                continue
            try:
                result = run_engine(engine, folder, env)
            except (OSError, PeerError) as error:
                its.error = str(error)
                lines = its.error.replace("\n", "\n    | ")
                print(f"  round {index + 1}: {engine.name} failed: {lines}", flush=True)
                continue
            its.seconds.append(result.pop("seconds"))
            its.about = result
            print(f"  round {index + 1}: {engine.name} {its.seconds[-1]:.2f} s"
                  f" (ready after {result['setup_seconds']:.0f} s)", flush=True)  # fmt: skip
    return runs


def figures(runs: dict[str, Runs], output_tokens: int, floor_seconds: float) -> dict[str, Any]:
    """Each engine's median, and the ratio of its time to ours, overall and by round."""
    result: dict[str, Any] = {}
    ours = runs[OURS]
    for name, its in runs.items():
        row: dict[str, Any] = {"seconds": its.seconds, **its.about}
        if its.error is not None:
            row["error"] = its.error
        if its.seconds:
            median = statistics.median(its.seconds)
            row["median_seconds"] = median
            row["output_tokens_per_second"] = output_tokens / median
            row["roofline_percent"] = 100 * floor_seconds / median
            if ours.seconds:
                row["ratio"] = median / statistics.median(ours.seconds)
                rounds = zip(
                    its.seconds, ours.seconds, strict=False
                )  # one may have failed in a later round
                row["ratios"] = [theirs / our for theirs, our in rounds]
        result[name] = row
    return result


def print_figures(result: dict[str, Any]) -> None:
    """Print a table of the engines, and their ratios to ours."""
    labels = {name: f"{name} {row.get('version', '')}".strip() for name, row in result.items()}
    width = max(map(len, labels.values()))
    print(f"  {'':{width}}  output tok/s  median s    least to most  of roofline  nanovllm's speed")
    for name, row in result.items():
        if "median_seconds" not in row:
            print(f"  {labels[name]:{width}}  failed")
            continue
        spread = f"{min(row['seconds']):.2f} to {max(row['seconds']):.2f}"
        line = (
            f"  {labels[name]:{width}}  {row['output_tokens_per_second']:12,.1f}"
            f"  {row['median_seconds']:8.2f}  {spread:>15}  {row['roofline_percent']:10.1f}%"
        )
        if name != OURS and "ratio" in row:
            low, high = min(row["ratios"]), max(row["ratios"])
            line += f"  {row['ratio']:.2f} ({low:.2f} to {high:.2f} by round)"
        print(line)
