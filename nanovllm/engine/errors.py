"""Errors of the engine. Imported without PyTorch."""


class NotReadyError(RuntimeError):
    """The engine lives, but cannot do this now: it sleeps, weights are missing, or requests run."""


class AsleepError(NotReadyError):
    """Memory is freed that `wake_up()` gets back."""


class EngineFullError(RuntimeError):
    """As many requests wait as may wait."""


class EngineEndedError(RuntimeError):
    """The engine was closed, or what it raised has ended it."""


class RankError(RuntimeError):
    """A rank raised, or its process ended. The engine is closed."""


class ExchangeError(RuntimeError):
    """An NCCL operation failed: another rank has probably ended."""
