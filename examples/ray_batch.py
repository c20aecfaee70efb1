"""Answer a file of requests with several replicas of a model, on all machines of a Ray cluster.

    python examples/ray_batch.py requests.jsonl results --temperature 0
    python examples/ray_batch.py requests.parquet results --model Qwen/Qwen3-8B --replicas 8
    RAY_ADDRESS=auto python examples/ray_batch.py s3://bucket/requests.jsonl s3://bucket/results ...

A line, or a row with its columns, is a request as in `nanovllm run-batch`: {"prompt": "12+34="} is
one. RESULTS is a folder of files of the same kind: what came in, and the answers to it.
"""

import argparse

import ray

from nanovllm.command.options import (
    add_engine_options,
    add_sampling_options,
    engine_options,
    sampling_options,
)
from nanovllm.ray import answer


def main(argv: list[str] | None = None) -> None:
    """Read, answer, write, and count what went wrong."""
    parser = argparse.ArgumentParser(description="Answer a file of requests with Ray Data.")
    parser.add_argument("input", help="JSON Lines, or Parquet if its name ends so")
    parser.add_argument("results", help="a folder, which must not be there yet")
    parser.add_argument("--replicas", type=int, default=1, help="engines")
    parser.add_argument(
        "--batch-size", type=int, default=2048, help="rows that one takes at a time"
    )
    add_engine_options(parser)
    add_sampling_options(parser)  # of rows that do not say
    args = parser.parse_args(argv)

    is_parquet = args.input.endswith(".parquet")
    # Lines as they are: one that is no JSON is an error of its row, and types may vary.
    requests = (ray.data.read_parquet if is_parquet else ray.data.read_text)(args.input)
    results = answer(
        requests,
        replicas=args.replicas,
        batch_size=args.batch_size,
        line_column=None if is_parquet else "text",
        sampling=sampling_options(args),
        **engine_options(args),
    )
    write = results.write_parquet if is_parquet else results.write_json
    write(args.results, mode="error")

    written = (ray.data.read_parquet if is_parquet else ray.data.read_json)(args.results)
    failed = written.filter(lambda row: row["error"] is not None).count()
    print(f"{written.count()} rows, {failed} of them with an error")


if __name__ == "__main__":
    main()
