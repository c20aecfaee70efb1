"""Measure how fast a checkpoint is loaded, and compare that with one thread and with its bounds.

    python benchmarks/loading.py [--gb 4] [--files 8] [--cold]

A checkpoint of random weights is written into a temporary folder (in `TMPDIR`), and loaded on the
CPU several times, each time into a new model. In turns with that, it measures loading with one
thread, reading the files into one small buffer (`cat files > /dev/null`), and filling a new model
from memory, which touches its pages for the first time and reads no files. With `--cold` the files'
pages are dropped before each turn. It prints median seconds; the last line is JSON.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
from safetensors.torch import save_file

from nanovllm.models import loader
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.parts import build_model

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 1000, "hidden_size": 2048,
    "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip
LAYER_GB = 0.1007  # in bfloat16
BUFFER_BYTES = 1 << 20


def make_model(folder: Path, device: str = "cpu") -> CausalLM:
    """The model of a folder in bfloat16, with weights that are not initialized."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return build_model(ModelConfig.from_dir(folder), max_positions=16)
    finally:
        torch.set_default_dtype(torch.float32)


def write_checkpoint(folder: Path, gigabytes: float, num_files: int) -> list[Path]:
    """Write files of random weights; their sizes differ by at most one tensor."""
    num_layers = max(1, round(gigabytes / LAYER_GB))
    config = json.dumps({**SHAPE, "num_hidden_layers": num_layers})
    (folder / "config.json").write_text(config, encoding="utf-8")
    shapes = {name: p.shape for name, p in make_model(folder, "meta").named_parameters()}
    names = list(shapes)
    num_files = min(num_files, len(names))
    files = [folder / f"{index:03}.safetensors" for index in range(num_files)]
    for index, file in enumerate(files):
        part = names[index * len(names) // num_files : (index + 1) * len(names) // num_files]
        save_file({n: torch.randn(shapes[n], dtype=torch.bfloat16) for n in part}, file)
    return files


def drop_pages(files: list[Path]) -> None:
    """Drop the files' pages from the system's page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(files: list[Path]) -> None:
    """Read the files into one buffer."""
    buffer = bytearray(BUFFER_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def seconds(run: Callable[[], object]) -> float:
    """The time that `run` takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@torch.inference_mode()
def measure(folder: Path, files: list[Path], repeats: int, cold: bool) -> dict[str, float]:
    """Median seconds of each kind of turn."""
    source = torch.ones(max(p.numel() for p in make_model(folder, "meta").parameters())).bfloat16()

    def load(num_threads: int) -> float:
        model = make_model(folder)
        with mock.patch.object(loader, "NUM_THREADS", num_threads):
            return seconds(lambda: loader.load_model(model, folder))

    def fill() -> float:
        params = [param.view(-1) for param in make_model(folder).parameters()]
        return seconds(lambda: [param.copy_(source[: len(param)]) for param in params])

    turns = {
        "load_model": lambda: load(loader.NUM_THREADS),
        "a tensor at a time": lambda: load(1),
        "cat": lambda: seconds(lambda: read_all(files)),
        "fill from memory": fill,
    }
    times: dict[str, list[float]] = {name: [] for name in turns}
    read_all(files)
    for _ in range(repeats + 1):
        for name, turn in turns.items():
            if cold:
                drop_pages(files)
            times[name].append(turn())
    return {name: statistics.median(values[1:]) for name, values in times.items()}  # 0 warms up


def main(argv: list[str] | None = None) -> None:
    """Write a checkpoint, measure, delete it, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gb", type=float, default=4.0, help="size of the checkpoint")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--cold", action="store_true", help="drop the files' pages before each turn"
    )
    args = parser.parse_args(argv)
    if args.gb <= 0 or args.files < 1 or args.repeats < 1:
        parser.error("--gb must be above 0, --files and --repeats at least 1")
    with TemporaryDirectory() as folder:
        files = write_checkpoint(Path(folder), args.gb, args.files)
        size = sum(file.stat().st_size for file in files)
        result = measure(Path(folder), files, args.repeats, args.cold)
    print(f"{size / 1e9:.2f} GB in {len(files)} files, {'cold' if args.cold else 'in memory'};"
          f" {torch.get_num_threads()} threads of PyTorch")  # fmt: skip
    for name, value in result.items():
        print(f"  {name:20} {value:8.3f} s {size / value / 1e9:8.2f} GB/s")
    print(json.dumps({"bytes": size, "cold": args.cold, "seconds": result}))


if __name__ == "__main__":
    main()
