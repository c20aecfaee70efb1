"""Hints for attributes that vLLM's objects have, and the objects here do not."""

from collections.abc import Mapping
from typing import Any

from nanovllm.utils.checks import did_you_mean

OUTPUTS = {
    "lora_request": "outputs come in the order of the prompts, and so do their adapters",
    "encoder_prompt": "models are decoders",
    "encoder_prompt_token_ids": "models are decoders",
    "multi_modal_placeholders": "models are text only",
    "kv_transfer_params": "KV blocks stay on the device",
    "routed_experts": "not supported",
}
EVENTS = {
    "outputs": (
        "an event has the new part of one sample, as `text` and `token_ids`; for vLLM's outputs"
        " pass SamplingParams(output_kind=...) or use AsyncLLMEngine"
    ),
}
METRICS = {
    **dict.fromkeys(
        ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time",
         "finished_time", "scheduled_ts", "queued_ts", "first_token_ts", "last_token_ts"),
        "times are durations in seconds: queue_time, prefill_time, decode_time,"
        " time_to_first_token, end_to_end_time",
    ),
    "time_in_queue": "it is queue_time",
    "first_token_latency": "it is time_to_first_token",
}  # fmt: skip
HINTS = {
    "RequestOutput": OUTPUTS,
    "PartialOutput": OUTPUTS,
    "StreamEvent": EVENTS,
    "RequestMetrics": METRICS,
}


def missing_field(record: Mapping[str, Any], name: str) -> AttributeError:
    """The error for a field that an output does not have."""
    kind = type(record).__name__
    answer = HINTS.get(kind, {}).get(name)
    hint = did_you_mean(name, record) if answer is None else f": {answer}"
    return AttributeError(f"{kind} has no field {name!r}{hint}")
