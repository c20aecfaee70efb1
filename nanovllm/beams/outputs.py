"""What `beam_search` returns: records with vLLM's names."""

from typing import Literal

from nanovllm.outputs import Record


class BeamSearchSequence(Record):
    """A sequence that was found.

    `tokens` and `text` begin with the prompt, as in vLLM, and lack the end-of-text token unless
    `include_stop_str_in_output` is true. `token_ids` are the generated tokens, including that.
    `cum_logprob` is the sum of their log-probabilities, and `score` this sum with the length
    penalty.
    """

    tokens: list[int]
    text: str
    token_ids: list[int]
    cum_logprob: float
    score: float
    finish_reason: Literal["stop", "length"]
    stop_reason: int | None


class BeamSearchOutput(Record):
    """The result of `beam_search` for one prompt: its sequences, the best one first."""

    sequences: list[BeamSearchSequence]
    prompt: str | None
    prompt_token_ids: list[int]
