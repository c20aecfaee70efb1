"""Answer a file of requests with several replicas of a model, on all machines of a Ray cluster.

    python examples/ray_batch.py requests.jsonl results --temperature 0
    python examples/ray_batch.py requests.parquet results --model Qwen/Qwen3-8B --replicas 8
    RAY_ADDRESS=auto python examples/ray_batch.py s3://bucket/requests.jsonl s3://bucket/results ...

A line, or a row with its columns, is a request as in `nanovllm run-batch`, for example
{"prompt": "12+34="}. RESULTS is a folder for files of the same kind, with the requests and their
answers. The status is 1 if some requests could not be answered.
"""

import argparse
import contextlib
import sys
from pathlib import Path

from nanovllm.command.options import (
    UsageError,
    add_engine_options,
    add_sampling_options,
    engine_options,
    sampling_options,
)

try:
    from nanovllm.ray import answer

    import ray  # isort: skip
except ImportError as error:  # it says what to install
    sys.exit(f"ray_batch.py: error: {error}")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s INPUT RESULTS [options]",
        description="Answer a file of requests with Ray Data.",
    )
    parser.add_argument("input", help="a file of JSON Lines, or .parquet")
    parser.add_argument("results", help="a folder that does not exist yet")
    parser.add_argument("--replicas", type=int, default=1, help="number of engines")
    parser.add_argument("--num-cpus", type=float, help="cores for each engine")
    parser.add_argument(
        "--batch-size", type=int, default=2048, help="rows that an engine gets at a time"
    )
    parser.add_argument(
        "--keep", nargs="+", default=(), metavar="COLUMN",
        help="a Parquet file's columns that are not part of a request",
    )  # fmt: skip
    add_engine_options(parser)
    add_sampling_options(parser)  # for rows that do not set them
    return parser


def answers_to(args: argparse.Namespace, is_parquet: bool) -> ray.data.Dataset:
    """The requests with their answers, which are computed when they are written."""
    if Path(args.results).exists():
        raise UsageError(f"{args.results} already exists; choose another folder, or remove it")
    # Lines are read as text: bad JSON is then an error of its row, and types may vary by row.
    requests = (ray.data.read_parquet if is_parquet else ray.data.read_text)(args.input)
    return answer(
        requests,
        replicas=args.replicas,
        batch_size=args.batch_size,
        num_cpus=args.num_cpus,
        keep=args.keep,
        line_column=None if is_parquet else "text",
        sampling=sampling_options(args),
        **engine_options(args),
    )


def count_rows(results: str, is_parquet: bool) -> tuple[int, int]:
    """The number of rows in a folder of results, and of those with an error."""
    read = ray.data.read_parquet if is_parquet else ray.data.read_json
    num_rows = num_failed = 0
    with contextlib.suppress(FileNotFoundError):  # without rows nothing is written
        errors = read(results).select_columns(["error"])
        for batch in errors.iter_batches(batch_format="pyarrow"):
            num_rows += len(batch)
            num_failed += len(batch) - batch["error"].null_count
    return num_rows, num_failed


def main(argv: list[str] | None = None) -> int:
    """Read the requests, write the answers, and count the errors."""
    parser = make_parser()
    args = parser.parse_args(argv)
    is_parquet = args.input.endswith(".parquet")
    try:
        answers = answers_to(args, is_parquet)
    except (UsageError, OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    (answers.write_parquet if is_parquet else answers.write_json)(args.results, mode="error")
    num_rows, num_failed = count_rows(args.results, is_parquet)
    print(f"{num_rows} rows, {num_failed} of them with an error")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
