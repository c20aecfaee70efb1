"""Logging: of nanovllm's own processes, and where NANOVLLM_LOG in the environment asks for it."""

import logging

LEVELS = {
    "debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING,
    "error": logging.ERROR, "off": logging.CRITICAL + 1,
}  # fmt: skip


def log_to_stderr(level: int) -> logging.Handler:
    """Write the package's log messages from `level` on to stderr only. Returns who writes them."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("nanovllm: %(message)s"))
    logger = logging.getLogger("nanovllm")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
    return handler


def log_by_environment(name: str) -> None:
    """Write messages from the level of this name on to stderr, as NANOVLLM_LOG asks."""
    if name.lower() not in LEVELS:
        raise ValueError(f"NANOVLLM_LOG must be one of {', '.join(LEVELS)}, got {name!r}")
    log_to_stderr(LEVELS[name.lower()])
