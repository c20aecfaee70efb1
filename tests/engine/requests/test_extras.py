"""Extras: what some requests ask for beyond plain sampling."""

from typing import Any

import pytest

from nanovllm import SamplingParams
from nanovllm.engine.features import NO_FEATURES
from nanovllm.engine.requests.extras import Extras
from nanovllm.engine.requests.intake import asks_more

# What extras read of parameters, and parameters that ask for it.
ASKING: dict[str, dict[str, Any]] = {
    "penalizes": dict(presence_penalty=0.5),
    "logprobs": dict(logprobs=0),
    "prompt_logprobs": dict(prompt_logprobs=0),
    "stop_token_ids": dict(stop_token_ids=[1]),
    "allowed_token_ids": dict(allowed_token_ids=[1]),
    "logit_bias": dict(logit_bias={1: 0.5}),
    "bad_words": dict(bad_words=["a"]),
    "stop": dict(stop="a"),
    "structured_outputs": dict(structured_outputs={"regex": "a"}),
    "logits_processors": dict(logits_processors=[lambda ids, logits: logits]),
    "hidden_states": dict(hidden_states=True),
    "priority": dict(priority=1),
    "skip_reading_prefix_cache": dict(skip_reading_prefix_cache=True),
}


class Recorded:
    """Parameters that record which of their attributes are read."""

    def __init__(self, params: SamplingParams) -> None:
        self.params, self.names = params, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self.params, name)


def test_extras_read_what_is_listed_here() -> None:
    """Else a parameter could be accepted without being checked, or have no effect."""
    params: Any = Recorded(SamplingParams())
    extras = Extras(None, 10, frozenset(), NO_FEATURES)
    extras.check(params)
    extras.parts(params, extras.constraint(params), 1, 0)
    assert params.names == ASKING.keys()


@pytest.mark.parametrize("name", ASKING)
def test_parameters_that_extras_read_load_them(name: str) -> None:
    assert not asks_more(SamplingParams())
    assert asks_more(SamplingParams(**ASKING[name]))
