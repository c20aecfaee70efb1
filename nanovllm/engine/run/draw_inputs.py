"""DrawInputs: what the sampler needs for a step's samples, on the host. Only rank 0 makes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.transfer import Array
from nanovllm.engine.schedule.sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.engine.run.reports import ReportInputs
    from nanovllm.layers.filters import Filters

COLDEST = 1e-30  # below it any difference of logits decides
HOTTEST = 1e37  # above it the sampler's products overflow, and logits no longer matter
NONE: list[int] = []  # no assumed tokens


@dataclass(slots=True)
class DrawInputs:
    """B samples on the host: temperatures and keys [B], filters, and the rows to report.

    Temperatures and keys are None if all rows are greedy, or if the device has them. Rows with the
    same kinds of filters are in one part, and parts are small enough that copies of their logits
    take bounded memory. The filters' tensors are on the CPU.
    """

    num_samples: int
    is_greedy: bool = True
    temperatures: Array | None = None
    keys: Array | None = None
    filters: "list[Filters]" = field(default_factory=list)
    report: "ReportInputs | None" = None


def draw_inputs(
    seqs: list[Sequence],
    vocab_size: int,
    device_type: str,
    computed: Computed | None = None,
    offsets: list[int] | None = None,
    assumed: Mapping[Sequence, list[int]] = {},
) -> DrawInputs:
    """What the sampler needs for the next token of each of `seqs`, or for a later one.

    For each sample, `offsets` has the number of the sequence's `assumed` tokens that come before
    it: the draw is as if these were right. Values in `computed` are left out: temperatures and
    keys that the step read from the table, or all except the filters if it drew the tokens.
    """
    inputs = DrawInputs(len(seqs))
    if reporting := [row for row, seq in enumerate(seqs) if seq.reports]:
        from nanovllm.engine.run.reports import drawn_report_inputs

        inputs.report = drawn_report_inputs(seqs, reporting)
    offsets = offsets or [0] * len(seqs)
    rows = [  # `is_narrowed`, but faster
        row
        for row, seq in enumerate(seqs)
        if seq.narrows or len(seq.token_ids) < seq.min_num_tokens
    ]
    if rows:
        before = [NONE] * len(seqs)
        if assumed:
            before = [assumed.get(s, NONE)[:n] for s, n in zip(seqs, offsets, strict=True)]
        draws = [(seqs[row], before[row]) for row in rows]
        from nanovllm.engine.run.narrowing import filters_of

        inputs.filters = filters_of(rows, draws, vocab_size, device_type)
    if computed is not None and computed.token_ids is not None and not inputs.filters:
        return inputs
    inputs.is_greedy = not any(seq.temperature > 0 for seq in seqs)
    if not inputs.is_greedy and (computed is None or computed.choices is None):
        inputs.temperatures = np.array([temperature_of(seq) for seq in seqs], np.float32)
        inputs.keys = np.array([*map(noise_key, seqs, offsets)])
    return inputs


def needs_logits(seqs: list[Sequence]) -> bool:
    """Whether a draw or a report of `seqs` reads more than the token that a decode step draws."""
    return any(seq.is_narrowed or seq.reports for seq in seqs)


def temperature_of(seq: Sequence) -> float:
    """A sequence's temperature, bounded so that products with logits do not overflow."""
    return min(max(seq.temperature, COLDEST), HOTTEST) if seq.temperature > 0 else 0.0


def noise_key(seq: Sequence, offset: int = 0) -> int:
    """The key of a sequence's draw after `offset` more tokens: 64 bits, signed.

    It depends on seed and position alone. `kernels/plain/noise.py` defines it, and computes it for
    rows of the device table.
    """
    num_tokens = seq.num_tokens + offset
    digest = xxhash.xxh64_intdigest(num_tokens.to_bytes(8, "little"), seed=seq.seed)
    return digest - (1 << 63)
