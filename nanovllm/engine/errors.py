"""Errors of the engine. Imported without PyTorch."""


class NotReadyError(RuntimeError):
    """The engine lives, but cannot do this now: it sleeps, weights are missing, or requests run."""


class AsleepError(NotReadyError):
    """The engine sleeps: memory is freed until `wake_up()`."""


class EngineFullError(RuntimeError):
    """The limit of waiting requests is reached."""


class EngineEndedError(RuntimeError):
    """The engine was closed, or an error has ended it."""


class RankError(RuntimeError):
    """A rank raised, or its process ended. The engine is closed."""


class ExchangeError(RuntimeError):
    """An NCCL operation failed: another rank has probably ended."""
