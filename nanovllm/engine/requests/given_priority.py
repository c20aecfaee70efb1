"""The priority that a call gives in addition to the parameters, as in vLLM."""

import dataclasses

from nanovllm.sampling_params import SamplingParams


def with_priority(params: SamplingParams, priority: int | None) -> SamplingParams:
    """A copy of the parameters, with the priority of a call that gives one.

    Parameters with another one are a ValueError; 0, the default, is none.
    """
    if priority is None:
        return params.clone()
    changed = dataclasses.replace(params, priority=priority)
    if params.priority not in (0, changed.priority):
        raise ValueError(
            f"priority={changed.priority}: the SamplingParams have priority={params.priority}; give"
            " one of them"
        )
    return changed
