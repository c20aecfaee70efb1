"""Batch jobs on many machines and GPUs, through Ray Data: `answer(dataset, model, replicas=8)`.

A row is a request, like a line of `nanovllm run-batch`, and comes out with its answer. Ray moves
the rows, and restarts a replica that has died.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

try:
    import pyarrow as pa
    import ray
except ImportError as error:
    hint = "pip install 'nanovllm[ray]'"
    raise ImportError(f"nanovllm.ray needs nanovllm[ray]: {error}; {hint}") from error

from nanovllm.batch.digests import digest_of
from nanovllm.batch.envelope import custom_id_of, parse_line
from nanovllm.batch.submit import Submitted, check_tokenizer, submit
from nanovllm.config import Config
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.engine.errors import RankError
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.ray.placement import is_on_cuda
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_float, check_int
from nanovllm.utils.list_checks import check_texts

logger = logging.getLogger("nanovllm")

ANSWER = ("generated_text", "finish_reason", "response", "error")  # the added columns
Answer = tuple[str | None, str | None, str | None, str | None]  # their values for one row


class PendingRow(NamedTuple):
    """A row with requests in the engine, and the outputs of the finished ones."""

    row: int
    custom_id: str
    submitted: Submitted
    outputs: list[RequestOutput]


class EngineReplica:
    """An engine that answers batches of rows, for `map_batches` with `batch_format="pyarrow"`.

    A row's columns are the fields of its request, except for those in `keep`, which only pass
    through. With `line_column`, requests are the JSON texts of that column, and all other columns
    pass through. `sampling` has sampling parameters for rows without them; further options are the
    engine's. The engine runs empty at the end of each batch, so a batch should have several times
    as many rows as run at once.
    """

    def __init__(
        self,
        model: str = EMBEDDED_MODEL,
        *,
        sampling: Mapping[str, Any] | None = None,
        keep: Iterable[str] = (),
        line_column: str | None = None,
        **engine_options: Any,
    ) -> None:
        self._options = {"model": model, **engine_options}
        self._sampling = dict(sampling or {})
        self._keep = check_texts("keep", keep)
        self._line_column = line_column
        SamplingParams(**self._sampling)
        self._llm = LLM(**self._options)
        check_tokenizer(self._llm)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Return the batch with the columns in `ANSWER`."""
        if not isinstance(batch, pa.Table):  # NumPy turns ints into floats if there are nulls
            raise TypeError(f"map_batches needs batch_format='pyarrow', got {type(batch).__name__}")
        if taken := [name for name in ANSWER if name in batch.column_names]:
            raise ValueError(f"rows already have a column {taken[0]!r}; rename it")
        lines = self._lines(batch)
        try:
            answers = self._answer(lines)
        except RankError as error:  # the engine is closed now
            logger.warning("%s; a new engine restarts the batch", error)
            self._llm = LLM(**self._options)
            answers = self._answer(lines)
        for place, name in enumerate(ANSWER):
            column = [answer[place] for answer in answers]
            batch = batch.append_column(name, pa.array(column, pa.string()))
        return batch

    def _lines(self, batch: pa.Table) -> list[Any]:
        """Each row's request: a line of JSON, or the object that it would be parsed to."""
        if self._line_column is not None:
            lines: list[Any] = batch[self._line_column].to_pylist()
            return lines
        kept = [name for name in self._keep if name in batch.column_names]
        rows = batch.drop_columns(kept).to_pylist(maps_as_pydicts="strict")
        return [_plain(row) for row in rows]

    def _answer(self, lines: list[Any]) -> list[Answer]:
        """Answers in the order of lines."""
        answers: dict[int, Answer] = {}
        pending: dict[int, PendingRow] = {}
        try:
            for index, line in enumerate(lines):
                try:
                    custom_id, value = _identify(line)
                    submitted = submit(self._llm, custom_id, value, self._sampling)
                except (TypeError, ValueError) as error:
                    answers[index] = (None, None, None, str(error))
                else:
                    row = PendingRow(index, custom_id, submitted, [])
                    pending |= dict.fromkeys(submitted.request_ids, row)
            while pending:
                for output in self._llm.step():
                    done = pending.pop(output["request_id"])
                    done.outputs.append(output)
                    if len(done.outputs) == len(done.submitted.request_ids):
                        answers[done.row] = _answered(done)
        finally:
            self._llm.discard_requests(pending)  # Ray can be set to continue after an exception
        return [answers[index] for index in range(len(lines))]


def answer(
    dataset: "ray.data.Dataset",
    model: str = EMBEDDED_MODEL,
    *,
    replicas: int = 1,
    batch_size: int = 2048,
    num_cpus: float | None = None,
    sampling: Mapping[str, Any] | None = None,
    keep: Iterable[str] = (),
    line_column: str | None = None,
    **engine_options: Any,
) -> "ray.data.Dataset":
    """Return `dataset` with an answer to each row: the columns in `ANSWER`.

    A replica takes `tensor_parallel_size` GPUs of one machine if the cluster has any, and
    `num_cpus` cores: by default none with GPUs, and otherwise one for each rank. Rows are moved by
    the batch, and a batch is repeated if its replica dies. The other options are those of
    `EngineReplica`. They are checked here; rows are computed when they are read.
    """
    config = Config(model=model, **engine_options)
    SamplingParams(**(sampling or {}))
    options = dict(model=config.model, sampling=sampling, keep=check_texts("keep", keep))
    if line_column is not None and keep:
        raise ValueError("with line_column all other columns are kept; keep needs rows of columns")
    replicas = check_int("replicas", replicas, 1)
    batch_size = check_int("batch_size", batch_size, 1)
    resources, device = _resources(config, replicas, num_cpus, ray.cluster_resources())
    # A task is a block, which could be a whole file otherwise.
    return dataset.repartition(target_num_rows_per_block=batch_size).map_batches(
        EngineReplica,
        fn_constructor_kwargs=options
        | {**engine_options, "line_column": line_column, "device": device},
        compute=ray.data.ActorPoolStrategy(size=replicas),
        batch_size=batch_size,
        batch_format="pyarrow",
        udf_modifying_row_count=False,
        **resources,
    )


def _resources(
    config: Config, replicas: int, num_cpus: float | None, cluster: Mapping[str, float]
) -> tuple[dict[str, float], str]:
    """The resources that Ray reserves for a replica, and the replica's device."""
    ranks, num_there = config.tensor_parallel_size, cluster.get("CPU", 0)
    on_cuda = is_on_cuda(config, cluster)
    if num_cpus is None:
        num_cpus = 0 if on_cuda else ranks
    check_float("num_cpus", num_cpus, 0.0, above=not on_cuda)
    if replicas * num_cpus > max(num_there - 1, 0):
        raise ValueError(
            f"{replicas} replicas of {num_cpus:g} CPUs leave none of the cluster's"
            f" {num_there:g} to read and write rows; use fewer replicas, or less num_cpus"
        )
    if on_cuda:
        num_gpus = cluster.get("GPU", 0)
        if replicas * ranks > num_gpus:  # an autoscaler may add some
            logger.warning(
                "%d replicas of %d GPUs: some wait until the cluster has more than its %g",
                replicas, ranks, num_gpus,
            )  # fmt: skip
        return {"num_gpus": ranks, "num_cpus": num_cpus}, "cuda"  # the replica sees only these
    return {"num_cpus": num_cpus}, "cpu"


def _identify(line: Any) -> tuple[str, dict[str, Any]]:
    """The id of a line, which determines its samples, and its object.

    The id of a line without a `custom_id` is a digest of its object.
    """
    if line is None:
        raise ValueError("the row has no line")
    text = line if isinstance(line, str) else json.dumps(line)
    value = parse_line(text.encode())
    custom_id = custom_id_of(value)
    if custom_id is None:
        custom_id = f"row-{digest_of(json.dumps(value, sort_keys=True)):016x}"
    return custom_id, value


def _plain(value: Any) -> Any:
    """A value of a row in JSON's types. Ray turns lists into arrays; they become lists again.

    Fields that are null are dropped: Arrow gives every struct the fields of all rows.
    """
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _answered(row: PendingRow) -> Answer:
    """The first sample's text and finish reason, and the whole response body in JSON."""
    body, first = row.submitted.body(row.custom_id, row.outputs), row.outputs[0]
    return first["text"], first["finish_reason"], json.dumps(body), None
