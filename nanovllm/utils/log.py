"""Logging of a process that is ours: the command, and an engine in a process of its own."""

import logging


def log_to_stderr(level: int) -> None:
    """Write what the package logs from `level` on to stderr, and to nothing else."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("nanovllm: %(message)s"))
    logger = logging.getLogger("nanovllm")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
