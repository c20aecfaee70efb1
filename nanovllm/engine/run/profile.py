"""Profiles: traces of what all ranks do between two calls, by PyTorch's profiler."""

import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from nanovllm.engine.exclusive import exclusive
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.run.shard import Shard

_running: dict[int, profile] = {}  # by the id of a shard of this process; at most one


@dataclass(frozen=True)
class StartProfile:
    """Begin to record on a rank."""

    directory: str

    def run(self, shard: Shard) -> None:
        """Record the host's work, and the device's if it is a GPU."""
        if _running:
            raise RuntimeError("this process is being profiled already, for another engine")
        try:
            Path(self.directory).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass
        except OSError as error:
            raise OSError(
                f"profiler_dir must be a directory that can be written, got {self.directory!r}:"
                f" {error}"
            ) from error
        activities = [ProfilerActivity.CPU]
        if shard.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities)
        profiler.start()
        _running[id(shard)] = profiler


@dataclass(frozen=True)
class CancelProfile:
    """Drop the recording of a rank, if it has begun one."""

    def run(self, shard: Shard) -> None:
        """Stop recording; nothing is written."""
        shard.synchronize()
        if (profiler := _running.pop(id(shard), None)) is not None:
            profiler.stop()


@dataclass(frozen=True)
class StopProfile:
    """End the recording of a rank, and write its trace."""

    directory: str
    name: str

    def run(self, shard: Shard) -> Path:
        """Wait for the device, and return the file."""
        shard.synchronize()
        profiler = _running.pop(id(shard))
        profiler.stop()
        path = Path(self.directory) / f"{self.name}-rank{shard.ranks.rank}.pt.trace.json.gz"
        profiler.export_chrome_trace(str(path))
        return path


class Profiles:
    """Records an engine's ranks. A recording that has not ended is dropped with the engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._is_profiling = False
        self._num_profiles = 0
        engine.at_close.append(self._drop)

    def start(self) -> None:
        """Begin to record what all ranks do, on host and device. It makes steps slower."""
        self.engine.check_open()
        if self.engine.asked.profiler_dir is None:
            raise ValueError(
                "start_profile writes into profiler_dir, which must be a directory, got None; pass"
                " profiler_dir=... when the engine is made"
            )
        if self._is_profiling:
            raise RuntimeError("a profile is being recorded already; stop_profile() ends it")
        self._start_recording(self.engine.asked.profiler_dir)

    def stop(self) -> list[Path]:
        """End the recording; returns the trace of each rank, for Perfetto or chrome://tracing."""
        self.engine.check_open()
        if not self._is_profiling:
            raise RuntimeError("no profile is being recorded; start_profile() begins one")
        assert self.engine.asked.profiler_dir is not None
        return self._stop_recording(self.engine.asked.profiler_dir)

    @exclusive
    def _start_recording(self, directory: str) -> None:
        try:
            self.engine.model_runner.everywhere(StartProfile(str(Path(directory).absolute())))
        except Exception:
            if self.engine.model_runner.failure is None:
                self.engine.model_runner.everywhere(CancelProfile())  # ranks that had begun
            raise
        self._is_profiling = True

    @exclusive
    def _stop_recording(self, directory: str) -> list[Path]:
        self._is_profiling = False
        self._num_profiles += 1
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{self._num_profiles}"
        paths: list[Path] = self.engine.model_runner.everywhere(
            StopProfile(str(Path(directory).absolute()), name)
        )
        return paths

    def _drop(self) -> None:
        if self._is_profiling:
            self._is_profiling = False
            if torch.cuda.is_available():
                with suppress(RuntimeError):  # the device has failed
                    torch.cuda.synchronize()
            _running.pop(id(self.engine.model_runner.shard)).stop()
