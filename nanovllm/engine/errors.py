"""Errors of the engine. Imported without PyTorch."""


class NotReadyError(RuntimeError):
    """The engine lives, but cannot do this now: it sleeps, weights are missing, or requests run."""


class EngineEndedError(RuntimeError):
    """The engine was closed, or what it raised has ended it."""
