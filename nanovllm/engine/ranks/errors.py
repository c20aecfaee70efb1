"""Errors of ranks. Imported without PyTorch."""


class RankError(RuntimeError):
    """A rank raised, or its process ended. The engine is closed."""


class ExchangeError(RuntimeError):
    """An NCCL operation failed: another rank has probably ended."""
