"""Logits after all parameters of their requests, for reports: what tokens are drawn from."""

import torch

from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.draw_inputs import DrawInputs
from nanovllm.engine.run.transfer import Array, upload, upload_all
from nanovllm.kernels.plain.draw import cut
from nanovllm.kernels.table import Kernels


def process(
    values: torch.Tensor, wanted: Array, computed: Computed, inputs: DrawInputs, kernels: Kernels
) -> None:
    """Change logits [R, V] in float32, in place: those of the rows `wanted` [R] of a step.

    First filters, with cuts, whose removed tokens have minus infinity; then the temperature, where
    it is above 0. Callables are not called again: `Extras` refuses reports of their requests.
    """
    device, temperatures = values.device, _temperatures(computed, inputs)
    places = {row: place for place, row in enumerate(wanted.tolist())}
    for part in inputs.filters:
        rows = part.rows.tolist()
        found = [index for index, row in enumerate(rows) if row in places]
        if not found:
            continue
        filters = upload_all(part, device)
        narrowed = computed.logits[filters.rows].to(torch.float32, copy=True)
        if part.writes:
            filters.narrow(narrowed, kernels)
        if filters.cuts is not None and temperatures is not None:
            narrowed = cut(narrowed, temperatures[filters.rows], filters.cuts)
        to = torch.tensor([places[rows[index]] for index in found], device=device)
        values[to] = narrowed[torch.tensor(found, device=device)]
    if temperatures is not None:
        own = temperatures[upload(wanted, device)]
        values.div_(torch.where(own > 0, own, 1.0)[:, None])


def _temperatures(computed: Computed, inputs: DrawInputs) -> torch.Tensor | None:
    """The temperatures of all rows; None if all are greedy."""
    if computed.choices is not None:
        return computed.choices[0]
    if inputs.temperatures is None:
        return None
    return upload(inputs.temperatures, computed.logits.device)
