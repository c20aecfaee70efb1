"""Logging in nanovllm's own processes: the command, and an engine in a separate process."""

import logging


def log_to_stderr(level: int) -> None:
    """Write the package's log messages from `level` on to stderr only."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("nanovllm: %(message)s"))
    logger = logging.getLogger("nanovllm")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
