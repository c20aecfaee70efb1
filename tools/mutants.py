"""Plant small mistakes in a copy of the code, one at a time, and see whether the tests catch them.

    python tools/mutants.py                     # the whole list, tools/mutants.txt
    python tools/mutants.py ledger "min_tokens"   # those that have one of these in their names
    python tools/mutants.py --jobs 4

A mutant in the list is a name that says what is broken, a file, the test files nearest to it, and
the lines that change, as in a patch without line numbers:

    [scheduler: a preemption does not let another sequence be tried]
    nanovllm/engine/schedule/scheduler.py
    tests/engine/schedule/test_scheduler.py::test_name tests/engine/schedule/test_scheduler_fuzz.py
    -        self.admission.retry()  # the next in line may be another sequence, which fits

`-` lines are removed, `+` lines are added, and lines that begin with a space stay. The lines before
the change must occur once in the file: else the mutant is an error, not a survivor. A test that is
named runs first, then the rest of the files; where there is no such test any more, the files run.
A last line `survives: ...` gives the reason why no test can catch a mutant, or why none should.

Each mutant is tested in a process of its own, forked from one that has imported PyTorch and what
else takes long, but nothing of this package. A test that runs longer than `--timeout` has caught
it, and the table says so. In the end each test that caught a mutant runs without one, and has to
pass. The exit status is 1 if one does not, if a mutant survives without a reason, or if less than
95% are caught. It runs where processes can be forked, and on the CPU: kernels for GPUs are
interpreted.
"""

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".txt")
LEAST_CAUGHT = 0.95
ENVIRONMENT = {  # of the tests; some of it is read when a package is imported
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NANOVLLM_TESTS_COLD": "1",
    "NANOVLLM_TESTS_SEED": "mutants",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TRITON_INTERPRET": "1",
}
IMPORTED = (  # before processes are forked, where they are installed
    "torch", "torch.distributed", "torch._dynamo", "numpy", "transformers", "tokenizers", "triton",
    "triton.runtime.interpreter", "llguidance.hf", "llguidance.torch", "safetensors.torch",
    "huggingface_hub", "xxhash", "hypothesis.strategies", "hypothesis.extra.numpy", "jsonschema",
    "starlette.applications", "starlette.testclient", "uvicorn", "uvloop", "httptools", "orjson",
    "prometheus_client", "httpx", "openai", "pydantic", "cloudpickle", "peft",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.llama.modeling_llama",
)  # fmt: skip
NOT_RUN = (3, 4, 5, 70)  # exit statuses of pytest, and ours: then no test has judged the mutant
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")


@dataclass(frozen=True)
class Mutant:
    """A small mistake: the lines `old` of a file become `new`."""

    name: str
    file: str
    tests: tuple[str, ...]  # files, or tests in them
    old: str
    new: str
    reason: str | None  # why it may survive

    @property
    def test_files(self) -> list[str]:
        """The files of the tests, each once."""
        return [*dict.fromkeys(test.partition("::")[0] for test in self.tests)]

    @property
    def first_tests(self) -> set[str]:
        """The names of the functions that run first."""
        return {test.rpartition("::")[2] for test in self.tests if "::" in test}

    def plant(self, text: str) -> str:
        """The text of its file with the mistake; a ValueError if it has no place there, or two."""
        places = [found.start() for found in re.finditer(f"(?m)^{re.escape(self.old)}", text)]
        if len(places) != 1:
            raise ValueError(
                f"mutant {self.name!r}: its old lines occur {len(places)} times in {self.file};"
                f" update them in {LIST.name}, with more lines around them if they are not unique"
            )
        planted = text[: places[0]] + self.new + text[places[0] + len(self.old) :]
        if self.file.endswith(".py"):
            try:
                compile(planted, self.file, "exec")
            except SyntaxError as error:
                raise ValueError(f"mutant {self.name!r} is no Python: {error}") from None
        return planted


def read_list(text: str) -> list[Mutant]:
    """The mutants of a list."""
    mutants = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        if lines:
            mutants.append(_read_mutant(lines))
    names = [mutant.name for mutant in mutants]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two mutants have the name {twice[0]!r}")
    return mutants


def _read_mutant(lines: list[str]) -> Mutant:
    name = lines[0].strip("[]")
    reason = None
    if lines[-1].startswith("survives: "):
        reason = lines.pop().removeprefix("survives: ")
    changes = lines[3:]
    if not changes or lines[0] != f"[{name}]" or any(line[0] not in "+- " for line in changes):
        raise ValueError(
            f"the mutant {lines[0]!r} must have a [name], a file, tests, and lines that begin with"
            " '-', '+' or a space"
        )
    old, new = (
        "".join(f"{line[1:]}\n" for line in changes if line[0] in kind) for kind in ("- ", "+ ")
    )
    if old == new:
        raise ValueError(f"mutant {name!r} changes nothing")
    return Mutant(name, lines[1], tuple(lines[2].split()), old, new, reason)


@dataclass
class Job:
    """A copy of the tree in which one process after the other runs tests."""

    folder: Path
    pid: int = 0
    start: float = 0.0
    mutant: Mutant | None = None
    text: str = ""  # of the mutant's file without it
    tests: list[str] = field(default_factory=list)

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def failed(self) -> Path:
        """The names of the tests that have failed, written after each test."""
        return self.folder / "failed.json"

    @property
    def seconds(self) -> float:
        return time.time() - self.start

    def begin(self, mutant: Mutant | None, tests: list[str]) -> None:
        """Start a process that runs the tests: until one fails, if there is a mutant."""
        self.mutant, self.tests, self.start = mutant, tests, time.time()
        if mutant is not None:
            self.text = (self.tree / mutant.file).read_text(encoding="utf-8")
            self._write(mutant.plant(self.text))
        self.failed.unlink(missing_ok=True)
        self.pid = os.fork()
        if self.pid == 0:
            _run_tests(self)  # does not return

    def poll(self, timeout: float) -> "Ended | None":
        """How the process ended, once it has, or a test took too long; kills its descendants."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        last = self.failed.stat().st_mtime if self.failed.exists() else 0.0
        is_late = pid == 0 and time.time() - max(self.start, last) > timeout
        if pid == 0 and not is_late:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if is_late:
            os.waitpid(self.pid, 0)
        failed = json.loads(self.failed.read_text(encoding="utf-8")) if self.failed.exists() else []
        log = self.log.read_text(encoding="utf-8", errors="replace")
        code = None if is_late else os.waitstatus_to_exitcode(status)
        if code in NOT_RUN:
            raise RuntimeError(f"the tests {' '.join(self.tests)} cannot run:\n{log}")
        ended = Ended(self.mutant, self.tests, self.seconds, failed, code, log)
        if self.mutant is not None:
            self._write(self.text)
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)
        return ended

    def _write(self, text: str) -> None:
        """Change the mutant's file. What Python has compiled of it may have the same time."""
        assert self.mutant is not None
        file = self.tree / self.mutant.file
        file.write_text(text, encoding="utf-8")
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


@dataclass(frozen=True)
class Ended:
    """What came of a run of tests. `status` is that of its process; None: a test took too long.

    A process that a signal has ended has the signal's number as status, below 0.
    """

    mutant: Mutant | None
    tests: list[str]
    seconds: float
    failed: list[str]
    status: int | None
    log: str

    @property
    def is_caught(self) -> bool:
        """Whether tests failed, or took too long, or ended their process."""
        return self.status != 0

    @property
    def how(self) -> str:
        """What caught the mutant."""
        if not self.is_caught:
            return "survived"
        if self.status is None:
            return f"timed out after {self.seconds:.0f} s"
        return self.failed[0] if self.failed else f"process ended with status {self.status}"


class Reporter:
    """A plugin of pytest that runs some tests first, and writes the names of those that fail."""

    def __init__(self, first: set[str], file: Path) -> None:
        self._first, self._file = first, file
        self._failed: list[str] = []
        self.has_passed = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Named tests first, slow ones last."""
        items.sort(
            key=lambda item: (
                item.name.partition("[")[0] not in self._first,
                "slow" in item.keywords,
            )
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the failures so far; the file's time says that a test has ended."""
        self.has_passed |= report.passed and getattr(report, "when", "") == "call"
        if report.failed:
            self._failed.append(report.nodeid)
        partial = self._file.with_suffix(".part")
        partial.write_text(json.dumps(self._failed), encoding="utf-8")
        partial.replace(self._file)

    pytest_collectreport = pytest_runtest_logreport  # of a file that cannot be imported


def _run_tests(job: Job) -> None:
    """Run a job's tests in this process, which was forked for it."""
    status = NOT_RUN[-1]
    try:
        os.setsid()
        log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, target in ((0, nothing), (1, log), (2, log)):
            os.dup2(target, number)
        os.chdir(job.tree)
        os.environ["PYTHONPATH"] = sys.path[0] = str(job.tree)
        mutant = job.mutant
        phases = [Phase.explicit, Phase.generate]  # a failure need not be made small
        settings.register_profile("mutants", phases=phases)
        settings.load_profile("mutants")
        options = ["-x"] if mutant else []
        options += ["--all", "-q", "-p", "no:cacheprovider", "--no-header"]
        options += [f"--basetemp={job.folder / 'tmp'}"]
        reporter = Reporter(mutant.first_tests if mutant else set(), job.failed)
        status = int(pytest.main([*options, *job.tests], [reporter]))
        if status == 0 and not reporter.has_passed:  # all tests were skipped
            status = pytest.ExitCode.NO_TESTS_COLLECTED
        assert Path(sys.modules["nanovllm"].__file__ or "").is_relative_to(job.tree)
    except BaseException:
        traceback.print_exc()
        status = NOT_RUN[-1]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@contextlib.contextmanager
def jobs(number: int) -> Iterator[list[Job]]:
    """Copies of the tree, and a cache of compiled kernels that ends with them."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm"
        if cache.is_dir():
            shutil.copytree(cache, Path(folder) / "cache" / "nanovllm", dirs_exist_ok=True)
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        made = [Job(Path(folder) / str(index)) for index in range(number)]
        for job in made:
            shutil.copytree(ROOT, job.tree, ignore=NOT_COPIED)
        try:
            yield made
        finally:
            for job in made:
                if job.pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(job.pid, signal.SIGKILL)


def run(
    work: Iterable[tuple[Mutant | None, list[str]]], jobs: list[Job], timeout: float
) -> Iterator[Ended]:
    """Run tests with a mutant each, or without one, in as many processes as there are jobs."""
    waiting, idle, busy = list(work)[::-1], list(jobs), []
    while waiting or busy:
        while waiting and idle:
            job = idle.pop()
            job.begin(*waiting.pop())
            busy.append(job)
        for job in list(busy):
            if (ended := job.poll(timeout)) is not None:
                busy.remove(job)
                idle.append(job)
                job.pid = 0
                yield ended
        time.sleep(0.01)


def import_first() -> None:
    """Import what takes long and is not part of this package."""
    os.environ |= ENVIRONMENT
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert "nanovllm" not in sys.modules
    gc.freeze()  # processes that are forked share these objects


def main() -> int:
    """Run the mutants that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names; all mutants without one")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each test")
    parser.add_argument("--log", action="store_true", help="print what the tests print")
    options = parser.parse_args()
    mutants = [
        mutant
        for mutant in read_list(LIST.read_text(encoding="utf-8"))
        if not options.names or any(name in mutant.name for name in options.names)
    ]
    if not mutants:
        parser.error(f"no mutant has {' or '.join(map(repr, options.names))} in its name")
    for mutant in mutants:  # before any of them runs
        mutant.plant((ROOT / mutant.file).read_text(encoding="utf-8"))
        if missing := [file for file in mutant.test_files if not (ROOT / file).exists()]:
            parser.error(f"mutant {mutant.name!r}: there is no {missing[0]}")
    start = time.monotonic()
    import_first()
    results = []
    with jobs(options.jobs) as places:
        for ended in run([(m, m.test_files) for m in mutants], places, options.timeout):
            assert ended.mutant is not None
            results.append(ended)
            print(f"{ended.seconds:6.1f} s  {ended.mutant.name}: {ended.how}", flush=True)
            if options.log:
                print(ended.log)
        print("the tests that caught them, without a mutant:", flush=True)
        wrong = failing_without(results, places, options.timeout)
    return report(results, wrong, time.monotonic() - start)


def failing_without(results: list[Ended], places: list[Job], timeout: float) -> list[str]:
    """The tests that caught a mutant, and fail without one too."""
    tests = sorted({test for ended in results for test in ended.failed[:1]})
    share = -(-len(tests) // len(places))
    parts = [tests[start : start + share] for start in range(0, len(tests), share or 1)]
    wrong = []
    for ended in run([(None, part) for part in parts], places, timeout):
        wrong += ended.failed
        if ended.is_caught and not ended.failed:
            wrong.append(f"{ended.how}: {' '.join(ended.tests)}")
    return wrong


def report(results: list[Ended], wrong: list[str], seconds: float) -> int:
    """Print who survived; returns the exit status."""
    caught = [ended for ended in results if ended.is_caught]
    survivors = [ended.mutant for ended in results if not ended.is_caught]
    late = sum(ended.status is None for ended in results)
    for mutant in survivors:
        assert mutant is not None
        print(f"survives: {mutant.name}: {mutant.reason or 'NO REASON'}")
    for ended in caught:
        if ended.mutant is not None and ended.mutant.reason:
            print(f"has a reason to survive, and was caught: {ended.mutant.name}")
    for name in wrong:
        print(f"fails without a mutant: {name}")
    unexplained = sum(mutant is not None and mutant.reason is None for mutant in survivors)
    rate = len(caught) / len(results)
    print(
        f"{len(caught)} of {len(results)} caught ({rate:.1%}), {late} of them by the time limit;"
        f" {len(survivors)} survive, {unexplained} without a reason; {seconds / 60:.1f} minutes"
    )
    return int(bool(unexplained or wrong or rate < LEAST_CAUGHT))


if __name__ == "__main__":
    sys.exit(main())
