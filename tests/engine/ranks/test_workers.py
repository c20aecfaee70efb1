"""Faults of several ranks: if one dies or raises, the caller gets an error, and nothing is left.

Real processes are killed while they load, compute or are idle. Every test and every script has a
deadline, at which it prints its stacks and ends the run.

It costs more than 20 seconds: each test starts ranks, most of which it kills.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pipe_paths
import pytest
import torch
import zygote
from conftest import need_gpus
from pipe_paths import PipePath
from safetensors.torch import load_file, save_file
from waiting import FOREVER, LIMIT, wait_until

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems
from nanovllm.engine.ranks import nccl_ranks
from nanovllm.engine.ranks import workers as workers_module
from nanovllm.engine.ranks.codec import encode
from nanovllm.engine.ranks.nccl_ranks import NcclRanks
from nanovllm.engine.ranks.shared_ranks import SharedRanks
from nanovllm.engine.ranks.workers import RankError, Worker, Workers
from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.start import startup
from nanovllm.models.config import ModelConfig
from nanovllm.utils.resources import trim_heap

pytestmark = pytest.mark.usefixtures("one_thread", "deadline")

DEADLINE = 2 * LIMIT  # seconds after which a test is taken to hang
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
IDS = [[3, 14, 15, 92, 65], [35, 89, 79]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TRACEBACK = "Traceback (most recent call last)"
SLEEP = f"time.sleep({FOREVER})"  # of a script whose processes are to end sooner
LOST_TENSOR = "model.layers.1.mlp.up_proj.weight"

# The beginning of scripts. `solve` prints whether an engine adds correctly.
PREAMBLE = f"""
import faulthandler
faulthandler.dump_traceback_later({DEADLINE}, exit=True)
import os, signal, sys, time
sys.path.append({str(Path(pipe_paths.__file__).parent)!r})
from pipe_paths import PipePath
from pathlib import Path
from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems
from nanovllm.engine.ranks.workers import Workers
PROBLEMS = sample_problems(20)
def make():
    return LLM(EMBEDDED_MODEL, device="cpu", dtype="float32", cpu_kvcache_gib=0.05,
               max_model_len=64, tensor_parallel_size=2)
def generate(llm, times=1):
    params = SamplingParams(temperature=0, max_tokens=12)
    return llm.generate([p for p, _ in PROBLEMS] * times, params, use_tqdm=False)
def solve(llm):
    print([out["text"] for out in generate(llm)] == [a for _, a in PROBLEMS], flush=True)
def report_pids(workers):
    print(*(worker.process.pid for worker in workers._workers), flush=True)
def load_other(path):
    start = Workers.start
    def elsewhere(self, config, model_config, _, draft):
        report_pids(self)
        start(self, config, model_config, PipePath(path), draft)
    Workers.start = elsewhere
"""


@pytest.fixture(scope="module")
def real_stderr(pytestconfig: pytest.Config) -> Iterator[int]:
    """The run's own stderr, even while pytest captures output."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        fd = os.dup(2)
    yield fd
    os.close(fd)


@pytest.fixture
def deadline(real_stderr: int) -> Iterator[None]:
    """If the test hangs, even in C, print its stacks and end the run."""
    faulthandler.dump_traceback_later(DEADLINE, exit=True, file=real_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


# What there is


def state(pid: int) -> tuple[str, int]:
    """A process's state and its parent: X where there is no process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    letter, parent = stat.rpartition(")")[2].split()[:2]
    return letter, int(parent)


def is_gone(pid: int) -> bool:
    """Whether a process that is not our child has ended; its parent may reap it later."""
    return state(pid)[0] in "XZ"


def children() -> set[int]:
    """This process's children, zombies among them."""
    return set(zygote.children(os.getpid()))


def open_files(pid: int | str = "self") -> set[str]:
    """A process's file descriptors and their targets; every socket has its own number."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add(f"{link.name} -> {link.readlink()}")
    return found


def belongings() -> set[str]:
    """All that an engine could leave behind, except processes: files, threads, shared memory.

    With CUDA in use, files and threads of its driver and of NCCL come and go at any time.
    """
    if torch.cuda.is_initialized():
        return shared_memory() | {thread.name for thread in threading.enumerate()}
    threads = Path("/proc/self/task").iterdir()
    return open_files() | set(map(str, threads)) | shared_memory()


def shared_memory() -> set[str]:
    return set(map(str, Path("/dev/shm").iterdir()))


def listeners(pid: int | str = "self") -> list[str]:
    """The addresses, in the kernel's hexadecimals, at which a process listens."""
    sockets = {file.partition("socket:[")[2].rstrip("]") for file in open_files(pid)}
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in sockets]


@functools.cache
def warm_up(device: str, path: Path) -> None:
    """Make one engine first: PyTorch opens files that stay open until the process ends."""
    with make_llm(path, device) as llm:
        generate(llm)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """After the block all is as before: processes at once, threads after a moment."""
    gc.collect()
    before, processes = belongings(), children()
    yield
    assert children() <= processes, "a process is left"
    wait_until("something is left", lambda: belongings() <= before)


# Engines


def make_llm(path: Path | str, device: str = "cpu", size: int = 2, **options: Any) -> LLM:
    if device == "cuda":
        need_gpus(size)
    pool = dict(cpu_kvcache_gib=0.05) if device == "cpu" else dict(num_kvcache_blocks=64)
    defaults = dict(device=device, dtype="float32", tensor_parallel_size=size, max_model_len=256)
    return LLM(path, **defaults | pool | options)


def generate(llm: LLM) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(IDS, GREEDY, use_tqdm=False)]


def solve(llm: LLM, start: int = 0) -> None:
    problems = sample_problems(start + 20)[start:]
    params = SamplingParams(temperature=0, max_tokens=12)
    outputs = llm.generate([prompt for prompt, _ in problems], params, use_tqdm=False)
    assert [out["text"] for out in outputs] == [answer for _, answer in problems]


def processes_of(llm: LLM) -> list["subprocess.Popen[bytes]"]:
    return [worker.process for worker in llm.model_runner.workers._workers]


def at_forward(llm: LLM, is_prefill: bool, act: Callable[[], object]) -> None:
    """Make rank 0 act just before it computes a step, which the others have begun."""
    compute = llm.model_runner.shard.compute

    def acting(inputs: StepInputs, *rest: Any) -> Any:
        if (inputs.prefill is not None) == is_prefill:
            act()
        return compute(inputs, *rest)

    llm.model_runner.shard.compute = acting  # type: ignore[method-assign]


def between_layers(llm: LLM, act: Callable[[], object]) -> None:
    """Make rank 0 act in the middle of the model, after ranks have exchanged tensors."""
    layer = llm.model_runner.shard.model.model.layers[1]
    layer.register_forward_pre_hook(lambda *_: act() and None)


def stop_and_kill(process: "subprocess.Popen[bytes]") -> None:
    """Stop a rank now, and kill it while the others wait for it."""
    process.send_signal(signal.SIGSTOP)
    threading.Timer(0.1, process.kill).start()


def assert_closed(llm: LLM, reason: str) -> None:
    """Every call raises an error that says that the engine is closed, and why."""
    for call in (lambda: generate(llm), lambda: llm.add_request([1, 2]), llm.step):
        with pytest.raises(RuntimeError, match=f"closed.*{reason}") as caught:
            call()
        assert not isinstance(caught.value, RankError)


def assert_one_error(error: BaseException) -> None:
    """Its traceback is the caller's, with no other error in the chain."""
    printed = "".join(traceback.format_exception(error))
    assert printed.removesuffix(f"{error}\n").count(TRACEBACK) == 1, printed


def send_others(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Make the other ranks load `path`, not what rank 0 loads."""
    start = Workers.start

    def elsewhere(
        self: Workers, config: Config, model_config: ModelConfig, _: Path, draft: None
    ) -> None:
        start(self, config, model_config, path, draft)

    monkeypatch.setattr(Workers, "start", elsewhere)


@pytest.fixture
def endless_model(copy_of_model: Callable[[], Path]) -> Path:
    """A checkpoint that never ends: its index and its weights are pipes."""
    path = copy_of_model()
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    os.mkfifo(path / "model.safetensors.index.json")
    return PipePath(path)


@contextlib.contextmanager
def loading(path: Path, file: str = "weights") -> Iterator[None]:
    """Run the block while a rank loads the endless model and waits for a file.

    While it waits for the weights, in safetensors, it holds Python's lock: its threads stand still.
    """
    with (path / "model.safetensors.index.json").open("w") as index:  # waits for the reader
        if file == "weights":
            index.write('{"weight_map": {"lm_head.weight": "model.safetensors"}}')
            index.close()
            time.sleep(0.3)
        yield


# A rank is killed


@pytest.mark.sampled(share=0.4)
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("size", "rank", "moment"),
    [
        (2, 1, "prefill"),
        (2, 1, "between layers"),
        (2, 1, "decode"),
        (2, 1, "exchange"),
        (4, 3, "prefill"),
        (4, 3, "decode"),
    ],
)
def test_a_killed_rank_raises_rank_error(
    device: str, size: int, rank: int, moment: str, overlap: bool, model_dir: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In a step, where rank 0 waits for a message of the dead rank.

    In an exchange of a decode step, rank 0 has waited for a moment when the rank dies.
    """
    warm_up(device, model_dir)
    with nothing_left():
        llm = make_llm(model_dir, device, size, overlap=overlap)
        processes, pending = processes_of(llm), llm.add_request([1, 2])
        kill = processes[rank - 1].kill
        if moment == "between layers":
            between_layers(llm, kill)
        elif moment == "exchange":
            at_forward(llm, False, lambda: stop_and_kill(processes[rank - 1]))
        else:
            at_forward(llm, moment == "prefill", kill)
        with pytest.raises(RankError) as caught:
            generate(llm)
        reason = f"rank {rank} of {size} was killed by SIGKILL"
        assert str(caught.value) == reason
        assert_one_error(caught.value)
        assert_closed(llm, reason)
        assert not llm.is_finished() and pending in llm.requests.unfinished
        for process in processes:
            with pytest.raises(ProcessLookupError):
                os.kill(process.pid, 0)
    if device == "cpu":
        assert capfd.readouterr().err == "", "the other ranks print something"


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, 40])
def test_the_next_call_reports_a_rank_killed_while_idle(
    device: str, is_known: bool, number: int, model_dir: Path
) -> None:
    """Killed just before the call, or so long before that it is known. 40 has no name."""
    warm_up(device, model_dir)
    name = "SIGKILL" if number == signal.SIGKILL else "signal 40"
    reason = f"rank 1 of 2 was killed by {name}"
    with nothing_left():
        llm = make_llm(model_dir, device)
        generate(llm)
        processes_of(llm)[0].send_signal(number)
        if is_known:
            wait_until("its end is not seen", lambda: llm.model_runner.workers.failure)
        with pytest.raises(RankError, match=reason):
            generate(llm)
        assert_closed(llm, reason)


@pytest.mark.slow
def test_a_stopped_rank_ends_with_the_caller() -> None:
    """A stopped process handles no signal except SIGKILL."""
    with running(f"llm = make()\nreport_pids(llm.model_runner.workers)\n{SLEEP}") as process:
        pids = read_pids(process)
        os.kill(pids[0], signal.SIGSTOP)
        process.kill()
        process.wait()
        assert_gone(pids)


@pytest.mark.slow
def test_ranks_import_the_callers_nanovllm(tmp_path: Path) -> None:
    """Also if a relative path in `sys.path` means another folder by now."""
    shutil.copytree(Path(nanovllm.__file__).parent, tmp_path / "lib" / "nanovllm")
    shard = tmp_path / "lib" / "nanovllm" / "engine" / "run" / "shard.py"
    shard.write_text(shard.read_text() + "\nprint('the copy', flush=True)\n")
    code = (
        f"import os, sys; os.chdir({str(tmp_path)!r}); sys.path.insert(0, 'lib')\n"
        "from nanovllm import LLM; os.chdir('/')\n" + PREAMBLE
    )
    code += "solve(make())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, cwd="/"
    )
    assert sorted(done.stdout.split("\n")) == ["", "True", "the copy", "the copy"], done.stderr


def test_a_rank_killed_after_its_last_message_is_reported(model_dir: Path) -> None:
    """Rank 0 can finish this step; the next one must not wait for the dead rank."""
    llm = make_llm(model_dir)
    draw = llm.model_runner.shard.draw

    def killing(*arguments: Any) -> Any:
        processes_of(llm)[0].kill()
        return draw(*arguments)

    llm.model_runner.shard.draw = killing  # type: ignore[method-assign]
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        generate(llm)


@pytest.mark.slow
def test_a_message_longer_than_the_ring_does_not_wait_for_a_dead_rank(model_dir: Path) -> None:
    """The rank is stopped, the ring fills, then the rank is killed."""
    warm_up("cpu", model_dir)
    with nothing_left():
        llm = make_llm(model_dir)
        process = processes_of(llm)[0]
        process.send_signal(signal.SIGSTOP)
        workers = llm.model_runner.workers

        def kill_and_check() -> None:  # the writer waits
            process.kill()
            workers.check()

        workers._writer.check = kill_and_check
        with pytest.raises(RankError, match="by SIGKILL"), workers.together():
            workers._writer.send(bytes(1 << 24))
        with pytest.raises(RankError, match="by SIGKILL"):
            generate(llm)
        assert_closed(llm, "rank 1 of 2 was killed")


@pytest.mark.slow
def test_a_rank_killed_while_loading_raises_rank_error(
    model_dir: Path, endless_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up("cpu", model_dir)
    connect = Workers.connect

    def kill(workers: Workers) -> None:
        with loading(endless_model):
            workers._workers[0].process.kill()

    def connect_and_be_killed(self: Workers) -> None:
        killer = threading.Thread(target=kill, args=[self])
        killer.start()
        try:
            connect(self)
        finally:
            killer.join()

    send_others(monkeypatch, endless_model)
    monkeypatch.setattr(Workers, "connect", connect_and_be_killed)
    death = "rank 1 of 2 was killed by SIGKILL"
    with nothing_left(), pytest.raises(RankError, match=death):
        make_llm(model_dir)


@pytest.mark.slow
@pytest.mark.parametrize("num_imports", ["none", "some"])
def test_a_rank_killed_at_once_raises_rank_error(
    num_imports: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has sent or read anything."""
    warm_up("cpu", model_dir)

    class Killed(Worker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            time.sleep(0.0 if num_imports == "none" else 0.4)
            self.process.kill()

    monkeypatch.setattr(workers_module, "Worker", Killed)
    death = r"rank \d of 4 was killed by SIGKILL"
    with nothing_left(), pytest.raises(RankError, match=death):
        make_llm(model_dir, size=4)


# A rank raises


@pytest.mark.slow
def test_a_rank_that_cannot_load_reports_why(
    model_dir: Path, copy_of_model: Callable[[], Path], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Rank 0 has loaded and waits for it. The error has two lines, because the path has."""
    warm_up("cpu", model_dir)
    broken = copy_of_model().rename(tmp_path / "two\nlines")
    tensors = load_file(broken / "model.safetensors")
    del tensors[LOST_TENSOR]
    save_file(tensors, broken / "model.safetensors")
    send_others(monkeypatch, broken)
    with nothing_left():
        with pytest.raises(RankError, match="rank 1 of 2 raised ValueError") as caught:
            make_llm(model_dir)
        assert TRACEBACK in str(caught.value) and LOST_TENSOR in str(caught.value)
        first = str(caught.value).splitlines()[0]
        assert first.startswith("rank 1 of 2 raised ValueError: ") and first.endswith("/two")
        assert_one_error(caught.value)


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_killed_while_ranks_connect_raises_rank_error(
    device: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs rank 0 abandons a thread in NCCL, which never ends.

    On the CPU the other rank may be connected before it dies: then the next call raises.
    """
    warm_up(device, model_dir)
    kind = NcclRanks if device == "cuda" else SharedRanks
    meet = kind.connect

    def alone(self: Any) -> None:
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        meet(self)

    monkeypatch.setattr(kind, "connect", alone)

    before = children()
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        generate(make_llm(model_dir, device))
    assert children() <= before


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_ranks_may_load_at_different_speeds(
    device: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank on a cold file system may take longer than the timeout for connecting."""
    warm_up(device, model_dir)
    load, start, started = startup.load_shard, Workers.start, list[Workers]()
    monkeypatch.setattr(nccl_ranks, "CONNECT_TIMEOUT", timedelta(seconds=5))  # rank 0's

    def noted(self: Workers, *arguments: Any) -> None:
        started.append(self)
        start(self, *arguments)

    def slow(*arguments: Any) -> Any:
        """Load when the other rank has long been ready."""
        others = started[0]._workers
        wait_until("a rank does not load", lambda: all(other.ready for other in others))
        if device == "cuda":
            time.sleep(6.0)
        return load(*arguments)

    monkeypatch.setattr(Workers, "start", noted)
    monkeypatch.setattr(startup, "load_shard", slow)  # rank 0's
    with make_llm(model_dir, device) as llm:
        generate(llm)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_raises_in_a_step_raises_rank_error(
    device: str, size: int, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets corrupt inputs: on the CPU it raises between two exchanges."""
    warm_up(device, model_dir)
    error, place = ("IndexError", "hidden") if device == "cpu" else ("ValueError", "decode")
    with nothing_left():
        llm = make_llm(model_dir, device, size)
        generate(llm)

        def corrupt(inputs: StepInputs) -> bytes:
            if device == "cuda":  # where an index out of range would break the context
                return encode(inputs)[:-4]
            assert inputs.prefill is not None
            positions = inputs.prefill.positions + 10**6
            prefill = dataclasses.replace(inputs.prefill, positions=positions)
            return encode(dataclasses.replace(inputs, prefill=prefill))

        monkeypatch.setattr("nanovllm.engine.ranks.workers.encode", corrupt)
        reason = rf"rank \d of {size} raised {error}"
        with pytest.raises(RankError, match=reason) as caught:
            generate(llm)
        assert TRACEBACK in str(caught.value) and f"in {place}" in str(caught.value)
        assert_one_error(caught.value)
        assert_closed(llm, reason)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("moment", ["prefill", "between layers", "decode"])
def test_an_error_of_rank_0_ends_the_others(device: str, moment: str, model_dir: Path) -> None:
    """The caller gets rank 0's own exception, and the engine is closed."""
    warm_up(device, model_dir)
    error = MemoryError("no room")

    def fail() -> None:
        raise error

    with nothing_left():
        llm = make_llm(model_dir, device)
        if moment == "between layers":
            between_layers(llm, fail)
        else:
            at_forward(llm, moment == "prefill", fail)
        with pytest.raises(MemoryError) as caught:
            generate(llm)
        assert caught.value is error
        assert_closed(llm, "rank 0 raised MemoryError")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(max_model_len=100, num_kvcache_blocks=1, kvcache_block_size=16),
        dict(max_model_len=100_000),
        dict(cpu_kvcache_gib=1e-9),
    ],
    ids=str,
)
def test_a_refusal_is_the_same_with_two_ranks(options: dict[str, Any], model_dir: Path) -> None:
    """And leaves nothing."""
    warm_up("cpu", model_dir)
    refusals = []
    for size in (1, 2):
        with nothing_left():
            with pytest.raises((ValueError, RuntimeError)) as caught:
                make_llm(model_dir, size=size, **options)
            message = re.sub(r"[\d.]+ MiB", "some MiB", str(caught.value))  # a rank's, not all
            refusals.append((type(caught.value), message))
    assert refusals[0] == refusals[1]


def test_a_checkpoint_that_no_rank_can_load_raises_rank_0s_error(
    model_dir: Path, copy_of_model: Callable[[], Path]
) -> None:
    """All ranks raise at about the same time; rank 0's own error is the clearest."""
    warm_up("cpu", model_dir)
    broken = copy_of_model()
    (broken / "model.safetensors").write_bytes(b"no tensors")
    with nothing_left(), pytest.raises(OSError, match="truncated or damaged"):
        make_llm(broken)


# Engines end


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_close_leaves_nothing(
    device: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second close is harmless; a call after it raises an error that says so.

    The ranks end by themselves: that they are killed after some time would take forever here.
    """
    warm_up(device, model_dir)
    monkeypatch.setattr(workers_module, "END_SECONDS", FOREVER)
    with nothing_left():
        llm = make_llm(model_dir, device)
        expected = generate(llm)
        llm.add_request([1, 2, 3])
        llm.step()
        llm.close()
        llm.close()
        with pytest.raises(RuntimeError, match="this LLM is closed; make a new one"):
            generate(llm)
    with make_llm(model_dir, device) as llm:
        assert generate(llm) == expected


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_collection_leaves_nothing(device: str, model_dir: Path) -> None:
    warm_up(device, model_dir)
    with nothing_left():
        llm = make_llm(model_dir, device)
        processes = processes_of(llm)
        del llm
        gc.collect()
        assert all(process.returncode is not None for process in processes)


@pytest.mark.parametrize("device", DEVICES)
def test_an_exception_in_a_with_block_leaves_nothing(device: str, model_dir: Path) -> None:
    warm_up(device, model_dir)
    with nothing_left(), contextlib.suppress(KeyError), make_llm(model_dir, device) as llm:
        generate(llm)
        raise KeyError
    with pytest.raises(RuntimeError, match="this LLM is closed; make a new one"):
        generate(llm)


@pytest.mark.parametrize("device", DEVICES)
def test_engines_listen_to_this_machine_alone(device: str, model_dir: Path) -> None:
    """An open engine listens to the loopback only, on the CPU not at all; a closed one does not.

    NCCL uses the loopback because `conftest` sets it.
    """
    warm_up(device, model_dir)
    gc.collect()
    before = listeners()
    llm = make_llm(model_dir, device)
    mine = [address for address in listeners() if address not in before]
    theirs = [address for process in processes_of(llm) for address in listeners(process.pid)]
    loopback = {"0100007F"} if device == "cuda" else set()  # the store's and NCCL's
    assert {address.partition(":")[0] for address in mine} == loopback
    assert {address.partition(":")[0] for address in theirs} <= loopback
    llm.close()
    assert set(listeners()) <= set(before)


@pytest.mark.slow
def test_twenty_engines_leave_nothing(model_dir: Path) -> None:
    """One after the other; the allocator may keep a tenth of a MiB for each.

    It may also move what other tests have left, once: a leak shows in the next twenty, too.
    """
    warm_up("cpu", model_dir)

    def resident_mib() -> float:
        gc.collect()
        trim_heap()  # whether the allocator still holds what an engine has freed is by chance
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    def growth() -> float:
        expected = None
        for turn in range(20):
            with nothing_left(), make_llm(model_dir) as llm:
                expected = expected or generate(llm)
                assert generate(llm) == expected
            if turn == 4:
                before = resident_mib()
        return resident_mib() - before

    assert growth() < 1.5 or growth() < 1.5


@pytest.mark.slow
def test_two_engines_are_independent() -> None:
    """They share no port, ring or process group."""
    problems = sample_problems(24)
    make = functools.partial(make_llm, EMBEDDED_MODEL)
    with make(max_num_seqs=3) as one, make(max_num_seqs=5) as other:
        answers: dict[tuple[int, int], str] = {}
        texts: dict[tuple[int, int], str] = {}

        def step(llm: LLM) -> None:
            texts.update({(id(llm), out["request_id"]): out["text"] for out in llm.step()})

        for index, (prompt, answer) in enumerate(problems):
            llm = (one, other)[index % 2]
            request = llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=12))
            answers[id(llm), request] = answer
            step(one)
            step(other)
        while not (one.is_finished() and other.is_finished()):
            step(one)
            step(other)
        assert texts == answers
        one.close()
        solve(other)


# Scripts


@contextlib.contextmanager
def running(code: str) -> Iterator["subprocess.Popen[str]"]:
    """A script in its own process group, which ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + code], stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, cwd="/",
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


def read_pids(process: "subprocess.Popen[str]") -> list[int]:
    """The process ids that `tell` has printed."""
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def assert_gone(pids: list[int]) -> None:
    """All of them end; those that do not are killed."""
    try:
        wait_until("a process is left", lambda: all(map(is_gone, pids)))
    finally:
        for pid in pids:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [
        SLEEP,
        "while True: generate(llm, 20)",
        f"if (child := os.fork()) == 0: {SLEEP}\nprint(child, flush=True)\n{SLEEP}",
    ],
    ids=["idle", "generating", "forked"],
)
def test_ranks_end_with_the_caller(work: str) -> None:
    """A killed caller closes nothing, and a process that it forked keeps its sockets open."""
    before = shared_memory()
    with running(
        f"llm = make()\nsolve(llm)\nreport_pids(llm.model_runner.workers)\n{work}"
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        pids = read_pids(process)
        forked = read_pids(process) if "fork" in work else []
        time.sleep(0.3)
        assert len(pids) == 1 and not any(map(is_gone, pids + forked))
        process.kill()
        process.wait()
        try:
            assert_gone(pids)
            assert not any(map(is_gone, forked)), (
                "the forked process ended, so this test shows nothing"
            )
        finally:
            for pid in forked:
                os.kill(pid, signal.SIGKILL)
    assert shared_memory() <= before


def test_close_ends_the_ranks_when_the_device_has_failed(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nothing_left():
        llm = make_llm(model_dir)

        def failing() -> None:
            raise RuntimeError("device lost")

        monkeypatch.setattr(llm.model_runner.shard, "drop_graphs", failing)
        with pytest.raises(RuntimeError, match="device lost"):
            llm.close()
        monkeypatch.undo()


@pytest.mark.slow
def test_a_forked_process_cannot_use_or_block_the_engine() -> None:
    """It has copies of all sockets; closing still ends the ranks, and using them is an error."""
    with running(
        """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
from nanovllm.engine.ranks import workers
llm = make()
solve(llm)
tried, its_end = os.pipe()
if (child := os.fork()) == 0:
    try:
        generate(llm)
    except RuntimeError as error:
        print(error, flush=True)
    os.write(its_end, b"x")
    FOREVER
os.read(tried, 1)
solve(llm)
workers.END_SECONDS = 1e4  # ranks that do not end by themselves would hang
llm.close()
print("closed", flush=True)
faulthandler.cancel_dump_traceback_later()  # its thread is not there after a fork
if (other := os.fork()) == 0:
    sys.exit(0)
print(os.waitpid(other, 0)[1], flush=True)
os.kill(child, signal.SIGKILL)
""".replace("FOREVER", SLEEP)
    ) as process:
        out, err = process.communicate(timeout=LIMIT)
        refused, refusal, *rest = out.splitlines()
        assert refusal.startswith("an LLM cannot be used in a process forked from the one")
        assert [refused, *rest] == ["True", "True", "closed", "0"]
        assert err == ""


@pytest.mark.slow
@pytest.mark.parametrize("file", ["index", "weights"])
def test_ranks_that_load_end_with_the_caller(file: str, endless_model: Path) -> None:
    """Reading from a network file system may take forever."""
    with running(f"load_other({str(endless_model)!r})\nmake()") as process:
        pids = read_pids(process)
        with loading(endless_model, file):
            assert len(pids) == 1 and not any(map(is_gone, pids))
            process.kill()
            process.wait()
            assert_gone(pids)


@pytest.mark.slow
def test_the_engine_works_after_ctrl_c() -> None:
    """The terminal sends it to the whole group; only the caller acts on it, once."""
    with running("""
llm = make()
report_pids(llm.model_runner.workers)
for turn in range(3):
    try:
        while True:
            print("generating", flush=True)
            generate(llm, 50)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        solve(llm)
        if turn == 2:
            raise
""") as process:
        assert process.stdout is not None
        pids = read_pids(process)
        for _ in range(3):
            assert process.stdout.readline() == "generating\n"
            time.sleep(0.3)
            os.killpg(process.pid, signal.SIGINT)
            for pid in pids:  # which may as well be in the group
                os.kill(pid, signal.SIGINT)
            while (line := process.stdout.readline()) == "generating\n":
                pass
            assert line == "interrupted\n"
            assert process.stdout.readline() == "True\n"
        rest, errors = process.communicate()
        assert all(map(is_gone, pids))
    assert rest == "" and process.returncode == -signal.SIGINT
    assert errors.count(TRACEBACK) == 1 and errors.endswith("KeyboardInterrupt\n")


@pytest.mark.slow
def test_ctrl_c_while_loading_ends_the_caller(endless_model: Path) -> None:
    """Rank 0 waits for ranks that load."""
    with running(f"load_other({str(endless_model)!r})\nmake()") as process:
        pids = read_pids(process)
        with loading(endless_model):
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate()
        assert_gone(pids)
    assert process.returncode == -signal.SIGINT
    assert errors.count(TRACEBACK) == 1 and errors.endswith("KeyboardInterrupt\n")


@pytest.mark.cold
@pytest.mark.sampled(share=1 / 3)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["file", "command", "stdin"])
def test_a_script_needs_no_main_guard(how: str, tmp_path: Path) -> None:
    """Ranks do not run the script, which would start ranks again."""
    code = f"{PREAMBLE}print('begin', flush=True)\nllm = make()\nsolve(llm)\n"
    code += "report_pids(llm.model_runner.workers)"
    file = tmp_path / "script.py"
    file.write_text(code)
    arguments = dict(file=[str(file)], command=["-c", code], stdin=["-"])[how]
    done = subprocess.run(
        [sys.executable, *arguments], input=code if how == "stdin" else "", text=True,
        capture_output=True, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    begin, right, pids = done.stdout.splitlines()
    assert (begin, right, len(pids.split())) == ("begin", "True", 1)
    assert is_gone(int(pids)), "a process outlives its parent"


@pytest.mark.slow
def test_two_scripts_at_a_time_are_independent() -> None:
    code = "llm = make()\nsolve(llm)\nsolve(llm)\n"
    with running(code) as one, running(code) as other:
        for process in (one, other):
            assert process.communicate() == ("True\n" * 2, "")
            assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", ["raise KeyError('mine')", "cycle = [llm]\ncycle.append(cycle)\ndel llm"],
    ids=["exception", "cycle"],
)  # fmt: skip
def test_the_interpreter_exits_with_an_open_engine(end: str) -> None:
    """The engine is in the middle of a request."""
    with running(f"""
llm = make()
report_pids(llm.model_runner.workers)
solve(llm)
llm.add_request([1, 2, 3])
llm.step()
{end}
""") as process:
        pids = read_pids(process)
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        rest, errors = process.communicate()
        assert all(map(is_gone, pids)), "a process outlives its parent"
    assert rest == ""
    if "raise" in end:
        assert process.returncode == 1 and errors.count(TRACEBACK) == 1
        assert errors.endswith("KeyError: 'mine'\n")
    else:
        assert (process.returncode, errors) == (0, "")
