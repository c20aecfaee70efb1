"""`use_beam_search`: the fields of a search for the most likely answers, as in vLLM."""

from collections.abc import Mapping
from typing import Any

from nanovllm.beam_search_params import BeamSearchParams
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int
from nanovllm.utils.json_text import shorten_json

# Parameters of sampling that a search has too.
SHARED = (
    "n", "max_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
    "truncate_prompt_tokens", "priority",
)  # fmt: skip
DEFAULTS = SamplingParams()
LONGEST = 1 << 31  # `max_tokens` of a search that only the model's length bounds


def beam_params(
    body: Mapping[str, Any], sampling: Mapping[str, Any], max_tokens: int | None
) -> BeamSearchParams | None:
    """The parameters of the search that a body asks for; None if it asks for none.

    `sampling` are the parameters of sampling that the body has. A search draws nothing, so that
    those of drawing are refused, unless they have no effect. `max_tokens` are the body's, or else
    the server's; None is as many as the model takes.
    """
    if not body.get("use_beam_search", False):
        if body.get("length_penalty", 1) != 1:
            raise ValueError("length_penalty needs use_beam_search to be true")
        return None
    if body.get("stream"):
        raise ValueError("use_beam_search must not be streamed: the best beam is known at the end")
    for name in ("best_of", "echo"):
        if name in body and body[name] not in (1, False):
            raise ValueError(f"{name} is not for use_beam_search")
    for name, value in sampling.items():
        if name not in SHARED and not _draws_nothing(name, value):
            raise ValueError(
                f"{name} is not for use_beam_search, which draws no tokens, got"
                f" {shorten_json(value)}"
            )
    return BeamSearchParams(
        beam_width=check_int("n", body.get("n", 1), 1),
        max_tokens=max_tokens or LONGEST,
        length_penalty=body.get("length_penalty", 1.0),
        ignore_eos=body.get("ignore_eos", False),
        include_stop_str_in_output=body.get("include_stop_str_in_output", False),
    )


def _draws_nothing(name: str, value: Any) -> bool:
    """Whether a parameter of drawing has a value that asks for nothing."""
    if name == "temperature":
        return bool(value == 0)
    return value is None or bool(value == getattr(DEFAULTS, name))
