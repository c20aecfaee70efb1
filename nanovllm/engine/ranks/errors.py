"""What goes wrong between ranks. Imported without PyTorch."""


class RankError(RuntimeError):
    """A rank raised, or its process ended. The engine is closed."""


class ExchangeError(RuntimeError):
    """NCCL failed, as another rank is not there any more."""
