"""Serve a model by several replicas behind one address, on all machines of a Ray cluster.

    python examples/ray_serve.py --replicas 2
    python examples/ray_serve.py --model Qwen/Qwen3-8B --max-replicas 8 --max-num-seqs 128
    RAY_ADDRESS=auto python examples/ray_serve.py --model Qwen/Qwen3-8B --replicas 8 --host 0.0.0.0

Options are those of `nanovllm serve`. With --max-replicas their number follows the load: Ray starts
replicas when more than half of --max-num-seqs requests are at each of them, and ends them when
fewer are. Ctrl-C ends all.
"""

import argparse
import sys
import threading
from typing import Any

from nanovllm.command.options import UsageError, add_engine_options, add_sampling_options
from nanovllm.config import Config

try:
    from nanovllm.ray import serving_app

    from ray import serve  # isort: skip
except ImportError as error:  # it says what to install
    sys.exit(f"ray_serve.py: error: {error}")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", description="Serve a model with Ray Serve."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address that the proxies listen at")
    parser.add_argument("--port", type=int, default=8000, help="port that the proxies listen at")
    parser.add_argument("--replicas", type=int, default=1, help="number of engines; least number")
    parser.add_argument("--max-replicas", type=int, help="most engines, if it follows the load")
    parser.add_argument("--num-cpus", type=float, help="cores for each engine")
    parser.add_argument("--api-key", action="append", metavar="KEY", help="a key of clients")
    add_engine_options(parser)
    add_sampling_options(parser)  # for requests that do not set them
    return parser


def application(args: argparse.Namespace) -> serve.Application:
    """The application that the command line describes."""
    options: dict[str, Any] = vars(args).copy()
    for name in ("host", "port"):
        del options[name]
    least, most = options.pop("replicas"), options.pop("max_replicas")
    if most is None:
        options["num_replicas"] = least
    else:
        target = options.get("max_num_seqs", Config.max_num_seqs) / 2
        options["autoscaling_config"] = {
            "min_replicas": least, "max_replicas": most, "target_ongoing_requests": target,
        }  # fmt: skip
    num_cpus = options.pop("num_cpus")
    if num_cpus is not None:
        options["ray_actor_options"] = {"num_cpus": num_cpus}
    return serving_app(**options)


def start(argv: list[str] | None = None) -> str:
    """Start the replicas, and return the address when the first of them is ready."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        app = application(args)
    except (UsageError, OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    serve.start(http_options={"host": args.host, "port": args.port})
    serve.run(app)
    return f"http://{args.host}:{args.port}"


def main(argv: list[str] | None = None) -> int:
    """Serve until Ctrl-C."""
    print("serving at", start(argv), flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        serve.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
