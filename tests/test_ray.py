"""Ray Data on this machine: two replicas, one of which is killed, and a replica without Ray."""

import contextlib
import importlib.util
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_clusters import shared_cluster
from reference import make_llm
from waiting import LIMIT

from nanovllm.batch.job import BatchJob
from nanovllm.batch.journal import Journal
from nanovllm.batch.lines import read_lines
from nanovllm.config import Config
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems

ray = pytest.importorskip("ray")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
ray_data = pytest.importorskip("ray.data")

from nanovllm.ray import ANSWER, EngineReplica, answer  # noqa: E402
from nanovllm.ray.data import _resources  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_ROWS, BATCH_SIZE = 60, 10
# Few sequences, so that a batch takes several steps; float32, so that all batches round the same.
OPTIONS: dict[str, Any] = dict(device="cpu", dtype="float32", max_num_seqs=4, max_model_len=64)
EXAMPLE = Path(__file__).parent.parent / "examples" / "ray_batch.py"


@pytest.fixture(scope="module")
def cluster() -> None:
    """A cluster with more cores than replicas."""
    shared_cluster()
    ray_data.DataContext.get_current().enable_progress_bars = False


@pytest.fixture(scope="module")
def replica() -> EngineReplica:
    return EngineReplica(EMBEDDED_MODEL, sampling={"temperature": 0}, keep=["label"], **OPTIONS)


def requests() -> list[dict[str, Any]]:
    """Sums, some of them with several samples, and one bad request."""
    rows: list[dict[str, Any]] = []
    for index, (prompt, _) in enumerate(sample_problems(NUM_ROWS)):
        hot = dict(temperature=2.0, n=2) if index % 5 == 0 else dict(temperature=0)
        rows.append(dict(custom_id=f"r{index}", prompt=prompt, max_tokens=8, **hot))
    rows[7]["max_tokens"] = 0
    return rows


def table(rows: list[dict[str, Any]]) -> Any:
    """A table with the columns of all rows, as Ray reads them."""
    return pa.Table.from_struct_array(pa.array(rows))


def jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers of `run-batch` to the requests."""
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    with make_llm(EMBEDDED_MODEL, **OPTIONS) as llm, Journal(output) as journal:
        for _ in BatchJob(llm, journal, {}).run(read_lines(io.BytesIO(jsonl(requests()).encode()))):
            pass
    answers = {}
    for line in output.read_text().splitlines():
        record = json.loads(line)
        error = record["error"]
        answers[record["custom_id"]] = (
            (None, error["message"].partition(": ")[2]) if error
            else (record["response"]["body"]["choices"], None)
        )  # fmt: skip
    assert len(answers) == NUM_ROWS
    return answers


def answers_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Answers by id; no id may occur twice."""
    answers: dict[str, Any] = {}
    for row in rows:
        custom_id = row["custom_id"] if "custom_id" in row else json.loads(row["text"])["custom_id"]
        assert custom_id not in answers, "a row was answered twice"
        choices = row["response"] and json.loads(row["response"])["choices"]
        assert row["generated_text"] == (choices and choices[0]["text"])
        assert row["finish_reason"] == (choices and choices[0]["finish_reason"])
        answers[custom_id] = (choices, row["error"])
    return answers


def example() -> Any:
    """The example script as a module."""
    spec = importlib.util.spec_from_file_location("ray_batch", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_example_accepts_an_empty_file(cluster: None, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "in.jsonl").touch()
    flags = ["--max-model-len=64", "--device=cpu"]
    assert example().main([str(tmp_path / "in.jsonl"), str(tmp_path / "results"), *flags]) == 0
    assert capsys.readouterr().out.endswith("0 rows, 0 of them with an error\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-tokens=-1"], "max-tokens must be"),
        (["--replicas=5"], "use fewer replicas"),
        (["--keep", "label"], "keep needs rows of columns"),
    ],
)
def test_the_example_reports_mistakes_in_one_line(
    cluster: None, flags: list[str], words: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "1+1="}\n')
    for results, expected in (("results", words), ("", "already exists")):
        with pytest.raises(SystemExit):
            example().main([str(tmp_path / "in.jsonl"), str(tmp_path / results), *flags])
        assert expected in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_example_answers_as_run_batch_does(
    cluster: None, tmp_path: Path, capsys: Any, undisturbed: dict[str, Any], kind: str
) -> None:
    source, results = tmp_path / f"in.{kind}", tmp_path / "results"
    options = {"replicas": 2, "batch_size": BATCH_SIZE, **OPTIONS}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    if kind == "jsonl":
        source.write_text(jsonl(requests()))
    else:
        rows = [row | {"label": "x"} for row in requests()]
        pq.write_table(table(rows), source)
        flags.append("--keep=label")
    assert example().main([str(source), str(results), *flags]) == 1
    assert capsys.readouterr().out.endswith(f"{NUM_ROWS} rows, 1 of them with an error\n")
    if kind == "jsonl":
        lines = "".join(file.read_text() for file in results.iterdir()).splitlines()
        rows = [json.loads(line) for line in lines]
    else:
        rows = pq.read_table(results).to_pylist()
    assert answers_of(rows) == undisturbed


@pytest.mark.slow
def test_a_killed_replica_neither_loses_nor_repeats_a_row(
    cluster: None, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """It is killed in the middle of a batch, when some of the rows are answered."""
    log = tmp_path / "log"
    log.mkdir()

    class Doomed(EngineReplica):
        """Dies at its twentieth step, in its second batch, unless another one has died before."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            actor = ray.get_runtime_context().get_actor_id()
            (log / f"started-{actor}-{os.getpid()}").touch()
            step, num_steps = self._llm.step, itertools.count(1)

            def doomed_step() -> Any:
                if next(num_steps) == 20:
                    with contextlib.suppress(FileExistsError):
                        (log / "killed").touch(exist_ok=False)
                        os.kill(os.getpid(), signal.SIGKILL)
                return step()

            self._llm.step = doomed_step  # type: ignore[method-assign]

    rows = (
        ray_data.from_items(requests(), override_num_blocks=NUM_ROWS // BATCH_SIZE)
        .map_batches(
            Doomed, fn_constructor_kwargs=dict(model=EMBEDDED_MODEL, **OPTIONS), num_cpus=1,
            compute=ray_data.ActorPoolStrategy(size=2), batch_format="pyarrow",
            batch_size=BATCH_SIZE,
        )
        .take_all()
    )  # fmt: skip
    assert (log / "killed").exists(), "no replica was killed"
    assert answers_of(rows) == undisturbed
    started = [file.name.split("-")[1] for file in log.glob("started-*")]
    assert len(started) > len(set(started)), "the replica was not restarted"


def rows_of(replica: EngineReplica, batch: Any) -> list[dict[str, Any]]:
    batch = batch if isinstance(batch, pa.Table) else table(batch)
    answered = replica(batch)
    assert answered.column_names == [*batch.column_names, *ANSWER]
    assert answered.drop_columns([*ANSWER]).equals(batch)
    assert all(field.type == pa.string() for field in answered.schema if field.name in ANSWER)
    rows: list[dict[str, Any]] = answered.to_pylist()
    return rows


def test_fields_of_other_rows_are_ignored(replica: EngineReplica) -> None:
    """Arrow gives every row the fields of all rows, nested ones too."""
    user = {"role": "user", "content": "12+34="}
    rows = rows_of(
        replica,
        [
            {"prompt": "12+34=", "logit_bias": {"52": -100}, "label": 1},
            {"messages": [user], "logit_bias": {"54": -100.0}, "label": None},
            {"prompt": "7+8=", "max_tokens": 1},
            {"method": "POST", "url": "/v1/completions", "custom_id": "a", "body": {
                "prompt": "7+8=", "stop_token_ids": [53]}},
        ],
    )  # fmt: skip
    assert [row["error"] for row in rows] == [None] * 4
    first, second, third, fourth = (row["generated_text"] for row in rows)
    assert "4" not in first and "6" in first
    assert "6" not in second and "4" in second
    assert (third, fourth) == ("1", "1")  # the token 53 is "5"
    (choice,) = json.loads(rows[3]["response"])["choices"]
    assert (choice["stop_reason"], choice["token_ids"][-1]) == (53, 53)
    assert [row["label"] for row in rows] == [1, None, None, None]


def test_a_map_is_read_as_an_object(replica: EngineReplica) -> None:
    biases = pa.array([[(52, -100.0)]], pa.map_(pa.int64(), pa.float64()))
    (row,) = rows_of(replica, pa.table({"prompt": ["12+34="], "logit_bias": biases}))
    assert row["error"] is None and "4" not in row["generated_text"]


@pytest.mark.slow
def test_an_array_is_read_as_a_list(cluster: None, replica: EngineReplica) -> None:
    """Ray turns NumPy's arrays into tensors, of equal lengths or not."""
    ids = np.array([55, 43, 56, 61], np.int64)
    for rows in ([{"prompt": ids}] * 2, [{"prompt": ids}, {"prompt": ids[:2]}]):
        (batch,) = ray_data.from_items(rows).iter_batches(batch_format="pyarrow")
        answered = rows_of(replica, batch)
        assert answered[0]["generated_text"] == "15"
        assert [row["error"] for row in answered] == [None, None]


def test_an_exception_discards_the_requests_of_its_batch(
    replica: EngineReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray can be set to continue after it: `max_errored_blocks`."""
    rows = [{"prompt": "12+34="}, {"messages": [{"role": "user", "content": "12+34="}]}]
    with monkeypatch.context() as patch:
        patch.setattr(replica._llm.tokenizer, "chat_template", None)
        with pytest.raises(RuntimeError, match="no chat template"):
            rows_of(replica, rows)
    assert [row["generated_text"] for row in rows_of(replica, rows)] == ["46", "46"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "x", "max_token": 5}, "unknown field 'max_token'; did you mean 'max_tokens'?"),
        ({"prompt": "1" * 64}, "max_model_len"),
        ({"prompt": "x", "custom_id": 5}, "custom_id must be a text, got 5"),
        ({"prompt": "x", "user": b"x"}, "bytes is not JSON serializable"),
        ({"prompt": None}, "a line must have a prompt or messages"),
    ],
)
def test_a_bad_row_gets_an_error(replica: EngineReplica, row: dict[str, Any], words: str) -> None:
    bad, good = rows_of(replica, [row, {"prompt": "12+34="}])
    assert words in bad["error"]
    assert bad["generated_text"] is bad["finish_reason"] is bad["response"] is None
    assert (good["generated_text"], good["error"]) == ("46", None)


def test_a_bad_line_gets_an_error() -> None:
    """Columns other than that of the lines are no fields, whatever their names."""
    replica = EngineReplica(line_column="text", sampling={"temperature": 0}, **OPTIONS)
    lines = ['{"prompt": "12+34="}', '{"prom', "5", None, '{"prompt": [55, 43, 56, 61]}']
    rows = rows_of(replica, [{"text": line, "prompt": 5} for line in lines])
    assert [row["generated_text"] for row in rows] == ["46", None, None, None, "15"]
    assert "not valid JSON" in rows[1]["error"]
    assert "must be a JSON object, got 5" in rows[2]["error"]
    assert "the row has no line" in rows[3]["error"]


def test_samples_do_not_depend_on_the_batch(replica: EngineReplica) -> None:
    """A row's samples depend on its request or its id, not on its position."""
    hot = dict(prompt="12+34=", temperature=2.0, max_tokens=16, ignore_eos=True)
    rows = [hot, {**hot, "custom_id": "a"}, {**hot, "custom_id": "b"}, hot]
    one, a, b, again = (row["generated_text"] for row in rows_of(replica, rows))
    assert one == again and len({one, a, b}) == 3
    (alone,) = rows_of(replica, [{**hot, "label": 3}])
    assert alone["generated_text"] == one


@pytest.mark.slow
def test_a_dead_rank_is_replaced() -> None:
    """A new engine repeats the batch, once."""
    replica = EngineReplica(sampling={"temperature": 0}, tensor_parallel_size=2, **OPTIONS)
    first = replica._llm
    first.model_runner.workers._workers[0].process.kill()
    (row,) = rows_of(replica, [{"prompt": "12+34="}])
    assert row["generated_text"] == "46"
    assert replica._llm is not first
    replica._llm.close()


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda r: r({"prompt": ["x"]}), TypeError, "needs batch_format='pyarrow', got dict"),
        (lambda r: r(pa.table({"prompt": ["x"], "error": [""]})), ValueError, "rename it"),
        (lambda r: EngineReplica(sampling={"n": 0}), ValueError, "n must be in"),
        (lambda r: EngineReplica(keep="label"), TypeError, "keep must be a list of texts"),
        (lambda r: answer(None, max_num_sequences=3), TypeError, "did you mean 'max_num_seqs'?"),
        (lambda r: answer(None, keep=["a"], line_column="b"), ValueError, "keep needs rows"),
        (lambda r: answer(None, replicas=0), ValueError, "replicas must be >= 1, got 0"),
        (lambda r: answer(None, batch_size=0), ValueError, "batch_size must be >= 1, got 0"),
        (lambda r: answer(None, sampling={"n": 0}), ValueError, "n must be in"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    replica: EngineReplica, make: Any, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        make(replica)


GPUS, CPUS = {"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0}


@pytest.mark.parametrize(
    ("options", "replicas", "num_cpus", "cluster", "expected"),
    [
        ({}, 2, None, GPUS, ({"num_gpus": 1, "num_cpus": 0}, "cuda")),
        (dict(tensor_parallel_size=2), 2, 3, GPUS, ({"num_gpus": 2, "num_cpus": 3}, "cuda")),
        (dict(device="cuda"), 9, None, CPUS, ({"num_gpus": 1, "num_cpus": 0}, "cuda")),
        (dict(device="cpu"), 2, None, GPUS, ({"num_cpus": 1}, "cpu")),
        (dict(tensor_parallel_size=2), 3, None, CPUS, ({"num_cpus": 2}, "cpu")),
        ({}, 7, None, CPUS, ({"num_cpus": 1}, "cpu")),
        ({}, 14, 0.5, CPUS, ({"num_cpus": 0.5}, "cpu")),
    ],
)
def test_resources_of_a_replica(
    options: Any, replicas: int, num_cpus: Any, cluster: Any, expected: Any
) -> None:
    assert _resources(Config("m", **options), replicas, num_cpus, cluster) == expected


@pytest.mark.parametrize(
    ("options", "replicas", "num_cpus", "words"),
    [
        (dict(device="cuda:1"), 1, None, "device must be 'auto', 'cpu' or 'cuda' with Ray"),
        ({}, 8, None, "8 replicas of 1 CPUs leave none of the cluster's 8"),
        ({}, 2, 4, "2 replicas of 4 CPUs leave none of the cluster's 8"),
        ({}, 1, 0, "num_cpus must be finite and > 0.0, got 0"),
        (dict(device="cuda"), 2, 4, "2 replicas of 4 CPUs leave none of the cluster's 8"),
        (dict(device="cuda"), 1, -1, "num_cpus must be finite and >= 0.0, got -1"),
    ],
)
def test_impossible_resources_are_refused(
    options: Any, replicas: int, num_cpus: Any, words: str
) -> None:
    """Replicas would wait forever if no core is left to read the rows."""
    with pytest.raises(ValueError, match=re.escape(words)):
        _resources(Config("m", **options), replicas, num_cpus, CPUS)


@pytest.mark.parametrize(("replicas", "waits"), [(2, False), (3, True)])
def test_replicas_that_wait_for_gpus_are_logged(
    replicas: int, waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _resources(Config("m", tensor_parallel_size=2), replicas, None, {"CPU": 8.0, "GPU": 4.0})
    words = ["3 replicas of 2 GPUs: some wait until the cluster has more than its 4"]
    assert caplog.messages == words * waits


def test_a_cluster_without_cores_is_refused() -> None:
    """Ray's resources have no entry for what a cluster lacks."""
    with pytest.raises(ValueError, match="leave none of the cluster's 0"):
        _resources(Config("m"), 1, None, {"memory": 1e9})
    gpus = ({"num_gpus": 1, "num_cpus": 0}, "cuda")
    assert _resources(Config("m"), 1, None, {"GPU": 1.0}) == gpus


def test_without_ray_the_error_names_the_extra() -> None:
    script = "import sys; sys.modules['ray'] = None; from nanovllm.ray import answer"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=LIMIT)
    assert b"ImportError: nanovllm.ray needs nanovllm[ray]: import of ray halted" in done.stderr


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(EMBEDDED_MODEL) / "config.json").read_text())
    with pytest.raises(RuntimeError, match="has no tokenizer; --tokenizer names one"):
        EngineReplica(str(tmp_path), load_format="dummy", **OPTIONS)
