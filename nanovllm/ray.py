"""Batch jobs on many machines and GPUs, through Ray Data: `answer(dataset, model, replicas=8)`.

A replica is an engine of its own in a process of Ray's, with all its ranks. Rows come in, and go
out with their answers: what a row may ask for is what a line of `nanovllm run-batch` may. Ray moves
the rows, and starts a replica that has died again. The engine knows nothing of it.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

try:
    import pyarrow as pa
    import ray
except ImportError as error:
    raise ImportError(f"nanovllm.ray needs nanovllm[ray]: {error}") from error

from nanovllm.batch.journal import digest_of
from nanovllm.batch.submit import check_tokenizer, submit
from nanovllm.config import Config
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.engine.ranks.errors import RankError
from nanovllm.llm import LLM
from nanovllm.openai.request import BatchRequest, parse_line
from nanovllm.openai.response import response_body
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_float, check_int, check_texts, shorten

logger = logging.getLogger("nanovllm")

ANSWER = ("generated_text", "finish_reason", "response", "error")  # the columns that rows get
Answer = tuple[str | None, str | None, str | None, str | None]


class EngineReplica:
    """For `map_batches` with `batch_format="pyarrow"`: an engine that answers batches of rows.

    A row's columns are the fields of its request, but for those in `keep`, which only pass through.
    Or else `line_column` names a column of JSON texts, and all others pass through. `sampling` has
    sampling parameters for rows that do not say; further options are the engine's. A batch is
    answered as a whole, and the engine runs empty at its end: it should have several times as many
    rows as run at once.
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
        """The batch with an answer to each row."""
        if not isinstance(batch, pa.Table):  # NumPy would make floats of numbers beside nulls
            raise TypeError(f"map_batches needs batch_format='pyarrow', got {type(batch).__name__}")
        if taken := [name for name in ANSWER if name in batch.column_names]:
            raise ValueError(f"rows have a column {taken[0]!r} already; rename it")
        lines = self._lines(batch)
        try:
            answers = self._answer(lines)
        except RankError as error:  # which has closed the engine
            logger.warning("%s; a new engine begins the batch again", error)
            self._llm = LLM(**self._options)
            answers = self._answer(lines)
        for place, name in enumerate(ANSWER):
            column = [answer[place] for answer in answers]
            batch = batch.append_column(name, pa.array(column, pa.string()))
        return batch

    def _lines(self, batch: pa.Table) -> list[Any]:
        """What each row asks for: a line of JSON, or what it would be parsed to."""
        if self._line_column is not None:
            lines: list[Any] = batch[self._line_column].to_pylist()
            return lines
        kept = [name for name in self._keep if name in batch.column_names]
        rows = batch.drop_columns(kept).to_pylist(maps_as_pydicts="strict")
        return [_plain(row) for row in rows]

    def _answer(self, lines: list[Any]) -> list[Answer]:
        """Answers in the order of lines."""
        answers: dict[int, Answer] = {}
        pending: dict[int, tuple[int, str, BatchRequest]] = {}
        try:
            for index, line in enumerate(lines):
                try:
                    custom_id, value = _identify(line)
                    request_id, request = submit(self._llm, custom_id, value, self._sampling)
                except (TypeError, ValueError) as error:
                    answers[index] = (None, None, None, str(error))
                else:
                    pending[request_id] = (index, custom_id, request)
            while pending:
                for output in self._llm.step():
                    index, custom_id, request = pending.pop(output["request_id"])
                    answers[index] = _answered(custom_id, request, output, self._llm)
        finally:
            self._llm.discard_requests(pending)  # Ray may be told to go on after an exception
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
    """`dataset` with an answer to each row: the columns in `ANSWER`.

    A replica takes `tensor_parallel_size` GPUs of one machine where the cluster has any, and
    `num_cpus` cores: if that does not say, none beside GPUs, and else one for each rank. A batch is
    what is moved, and what is done again if its replica dies. The other options are as in
    `EngineReplica`; they are checked here, and nothing is computed before the rows are asked for.
    """
    config = Config.from_options(model, engine_options)
    SamplingParams(**(sampling or {}))
    options = dict(model=config.model, sampling=sampling, keep=check_texts("keep", keep))
    if line_column is not None and keep:
        raise ValueError("with line_column all other columns are kept; keep is for rows of columns")
    replicas = check_int("replicas", replicas, 1)
    batch_size = check_int("batch_size", batch_size, 1)
    resources, device = _resources(config, replicas, num_cpus, ray.cluster_resources())
    # Blocks are the tasks, however large the files are that they come from.
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
    """What a replica takes of the cluster, and its device there."""
    if config.device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda' with Ray, got {config.device!r}")
    ranks, num_there = config.tensor_parallel_size, cluster.get("CPU", 0)
    on_cuda = config.device == "cuda" or (config.device == "auto" and cluster.get("GPU", 0) > 0)
    if num_cpus is None:
        num_cpus = 0 if on_cuda else ranks
    check_float("num_cpus", num_cpus, 0.0, above=not on_cuda)
    if replicas * num_cpus > max(num_there - 1, 0):
        raise ValueError(
            f"{replicas} replicas of {num_cpus:g} CPUs leave none of the cluster's"
            f" {num_there:g} to read and write; take fewer replicas, or less num_cpus"
        )
    if on_cuda:
        num_gpus = cluster.get("GPU", 0)
        if replicas * ranks > num_gpus:  # an autoscaler may bring others
            logger.warning(
                "%d replicas of %d GPUs: some wait until the cluster has more than its %g",
                replicas, ranks, num_gpus,
            )  # fmt: skip
        return {"num_gpus": ranks, "num_cpus": num_cpus}, "cuda"  # Ray shows it these GPUs alone
    return {"num_cpus": num_cpus}, "cpu"


def _identify(line: Any) -> tuple[str, dict[str, Any]]:
    """What a line's samples hang on, and its object.

    One without a `custom_id` is known by what it asks for.
    """
    if line is None:
        raise ValueError("the row has no line")
    text = line if isinstance(line, str) else json.dumps(line)
    value = parse_line(text.encode())
    custom_id = value.get("custom_id")
    if custom_id is None:
        custom_id = f"row-{digest_of(json.dumps(value, sort_keys=True)):016x}"
    if not isinstance(custom_id, str):
        raise TypeError(f"custom_id must be a text, got {shorten(custom_id)}")
    return custom_id, value


def _plain(value: Any) -> Any:
    """Arrow's structs have the fields of all rows: those that are null are not there.

    Arrays are Ray's own, and become lists.
    """
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _answered(custom_id: str, request: BatchRequest, output: RequestOutput, llm: LLM) -> Answer:
    """The first sample's text and ending, and everything as OpenAI's API has it."""
    body = response_body(custom_id, request, output, llm)
    return output["text"], output["finish_reason"], json.dumps(body), None
