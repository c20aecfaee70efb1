"""Draws that cannot be prepared: their sequences get no token, the others theirs.

Imported at the first exception.
"""

from collections.abc import Callable

import torch

from nanovllm.engine.schedule.failures import FOR_CALLERS, shown
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.kernels.integers import cdiv
from nanovllm.layers.filters import Filters

Draw = tuple[Sequence, list[int]]  # a sequence, and the tokens assumed before the drawn one
MakeFilters = Callable[[list[int], list[Draw]], list[Filters]]


def filters_despite(
    error: BaseException, make: MakeFilters, rows: list[int], draws: list[Draw], vocab_size: int
) -> list[Filters]:
    """What `make` returns for the rows for which it raises nothing, and filters without a token.

    `make` has raised `error` for all rows together. If it raises nothing for a single row, neither
    is the error one of a sequence: it is raised.
    """
    if isinstance(error, FOR_CALLERS):
        raise error
    good, failed = [], []
    for row, (seq, assumed) in zip(rows, draws, strict=True):
        try:
            make([row], [(seq, assumed)])
            good.append((row, (seq, assumed)))
        except FOR_CALLERS:
            raise
        except BaseException as own:
            index = len(seq.token_ids) + len(assumed)
            seq.parts.errors[index] = f"preparing a draw raised {shown(own)}"
            failed.append(row)
    if not failed:
        raise error
    nothing = torch.zeros(len(failed), cdiv(vocab_size, 32), dtype=torch.int32)
    filters = [Filters(torch.tensor(failed), masks=nothing)]
    return filters + (make(*map(list, zip(*good, strict=True))) if good else [])
