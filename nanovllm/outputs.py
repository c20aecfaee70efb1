"""What `generate` returns."""

from typing import Literal, TypedDict

FinishReason = Literal["stop", "length", "abort"]


class RequestMetrics(TypedDict):
    """Seconds: until first scheduled, until the first token, for each token after it, in all.

    None for what did not come to be: an aborted request may have no first token. Of several samples
    the longest counts.
    """

    queue_time: float | None
    time_to_first_token: float | None
    time_per_output_token: float | None
    end_to_end_time: float


class EngineStats(TypedDict):
    """What an engine has done since it was made, and what it is at now.

    Token counts are of tokens computed: a preempted prompt counts again. Prompt tokens are asked of
    the prefix cache once, when a request is first admitted. Running are sequences, each
    of a request's samples by itself; those that wait for their prompt are not counted. With
    `overlap`, tokens that are dropped count as decoded.
    """

    num_waiting: int
    num_running: int
    num_finished: int
    num_aborted: int
    num_preemptions: int
    prefill_tokens: int
    decode_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    blocks_used: int
    num_blocks: int


class TokenLogprob(TypedDict):
    """A token that might have come: its log-probability, and how many had a higher one, plus 1."""

    token_id: int
    text: str
    logprob: float
    rank: int


class Completion(TypedDict):
    """What a sequence came to.

    `token_ids` holds the generated tokens with those that stopped it; `text` is their decoding up
    to a stop string (empty where the model came without a tokenizer). `stop_reason` is the stop
    token id or the stop string that ended it, None for EOS and for other endings. `logprobs` has,
    where they were asked for, a list for each token: itself, and then as many of the most likely
    ones as were asked for, less itself.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[list[TokenLogprob]] | None
    cumulative_logprob: float | None


class CompletionOutput(Completion):
    """One of a request's `n` samples."""

    index: int


class RequestOutput(Completion):
    """The result of one request: its samples in `outputs`, and the first one's fields once more.

    `num_cached_tokens` counts the prompt tokens found in the prefix cache on first admission.
    `prompt_logprobs` has, where they were asked for, None for the first token of the prompt and
    then a list for each, as in `logprobs`; as far as they were computed, if it was aborted.
    """

    request_id: int
    outputs: list[CompletionOutput]
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: list[list[TokenLogprob] | None] | None
    metrics: RequestMetrics


class StreamEvent(TypedDict):
    """What a step has brought for one of the prompts of `stream`.

    `index` is the prompt's place in the call, `sample` which of its `n` samples it is. All `text`s
    of a sample together are its output's text, all `token_ids` its token ids, all `logprobs` its
    own, if they are asked for; `finish_reason` is None until the last event.
    """

    index: int
    sample: int
    request_id: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: list[list[TokenLogprob]] | None
