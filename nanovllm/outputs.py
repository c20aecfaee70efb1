"""The types of outputs, stream events and statistics: dicts with their fields as attributes too."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from nanovllm.utils import names_beside

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Does nothing: it tells type checkers that a record takes its fields by name."""
        return lambda kind: kind

    __getattr__ = names_beside("outputs")


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass_transform(kw_only_default=True)
class Record(dict[str, Any]):
    """A dict with its items as attributes too: `output["text"]` is `output.text`."""

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name):
            if name in self:
                return self[name]
            # Python itself asks for names like __deepcopy__, often; a search takes 50 microseconds.
            if name.startswith("__"):
                raise AttributeError(name)
            from nanovllm.from_vllm.names.python import missing_field

            raise missing_field(self, name)

        __setattr__ = dict.__setitem__

    def __dir__(self) -> list[str]:
        """The attributes and the fields, so that editors and notebooks complete both."""
        return [*super().__dir__(), *self]


class RequestMetrics(Record):
    """Times of a request in seconds: queued, to the first token, for each later token, and total.

    `prefill_time` is from the first step to the first token, and `decode_time` from there to the
    end. A time is None if its event did not happen: an aborted request may have no first token.
    With several samples, the longest one counts; `num_preemptions` counts all samples.
    """

    queue_time: float | None
    time_to_first_token: float | None
    time_per_output_token: float | None
    end_to_end_time: float
    prefill_time: float | None
    decode_time: float | None
    num_preemptions: int


class EngineStats(Record):
    """Counts of what an engine has done since it was made, and what it is doing.

    Tokens are counted when they are computed: a preempted prompt counts again, and with `overlap`
    dropped tokens count as decoded. Drafted tokens count as decoded if they are accepted. The
    prefix cache is queried for a request's prompt tokens once, on first admission. `num_running`
    counts each sample of a request as one; samples that wait for their prompt are not counted.
    Blocks have the KV of all cache groups. A model with recurrent layers has slots for states:
    those of running sequences are used, and others may hold checkpoints, which are the states of
    cached prefixes.
    """

    num_waiting: int
    num_running: int
    num_finished: int
    num_aborted: int
    num_preemptions: int
    prefill_tokens: int
    decode_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    blocks_used: int
    num_blocks: int
    state_slots_used: int
    checkpoints_used: int
    num_state_slots: int

    @property
    def cache_usage(self) -> float:
        """The used share of the KV blocks; without blocks, of the slots for states."""
        if self.num_blocks:
            return self.blocks_used / self.num_blocks
        return self.state_slots_used / self.num_state_slots


class TokenLogprob(Record):
    """A possible token. Its `rank` is 1 plus the number of tokens with higher log-probabilities."""

    token_id: int
    text: str
    logprob: float
    rank: int

    @property
    def decoded_token(self) -> str:
        """The text, by vLLM's name."""
        return self.text


class ByTokenId:
    """The attribute of a field with log-probabilities: a list of `TokenLogprobs`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, record: Any, _: Any) -> Any:
        module = import_module("nanovllm.token_logprobs")  # it imports this one
        return self if record is None else module.by_token_id(record, self.name)


class Completion(Record):
    """The result of a sequence.

    `token_ids` holds the generated tokens, including those that stopped it. `text` is their
    decoding without the token or the string that stopped it, unless the request includes these; it
    is empty if the model has no tokenizer. `stop_reason` is the stop token id or the stop string
    that ended the sequence, and None for EOS and other endings.
    `logprobs`, if requested, has an entry for each token: the token itself, then the requested
    number of most likely tokens without it. In `output["logprobs"]` an entry is a list; in
    `output.logprobs` it is a dict by token id, as in vLLM.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[dict[int, TokenLogprob]] | None
    cumulative_logprob: float | None

    if not TYPE_CHECKING:
        logprobs = ByTokenId("logprobs")

    @property
    def message(self) -> dict[str, Any] | None:
        """After `chat`: the answer in the form of OpenAI's API; otherwise None."""
        return self.get("message")

    @property
    def hidden_states(self) -> Any:
        """If requested: the states [tokens, hidden] in float32 from which the tokens were drawn.

        The first state is that of the prompt's last token, and each other one that of the previous
        generated token.
        """
        return self.get("hidden_states")


class CompletionOutput(Completion):
    """One of a request's `n` samples."""

    index: int


class RequestOutput(Completion):
    """The result of one request: its samples in `outputs`, and the first sample's fields directly.

    `prompt` is the prompt's text, which the chat template made for a conversation; it is None if
    the prompt was token ids. `num_cached_tokens` counts the prompt tokens found in the prefix cache
    on first admission. `prompt_logprobs`, if requested, has None for the first token of the prompt
    and then an entry for each token, as in `logprobs`; an aborted request has the computed ones.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, TokenLogprob] | None] | None
    metrics: RequestMetrics

    if not TYPE_CHECKING:
        prompt_logprobs = ByTokenId("prompt_logprobs")

    @property
    def finished(self) -> bool:
        """True: only a request that has ended has an output. vLLM's name."""
        return True

    @property
    def prompt_hidden_states(self) -> Any:
        """If requested: the states [prompt tokens, hidden] of the prompt, in float32."""
        return self.get("prompt_hidden_states")


class StreamEvent(Record):
    """The new part of one sample, from one step of `stream`.

    `index` is the prompt's position in the call, `sample` the sample's among the prompt's `n`. The
    `text`, `token_ids` and `logprobs` of a sample's events, joined in order, are those of its
    output. `finish_reason` is None until the last event.
    """

    index: int
    sample: int
    request_id: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: list[list[TokenLogprob]] | None

    @property
    def delta(self) -> dict[str, Any] | None:
        """In `stream_chat`: the new part in the form of OpenAI's API; otherwise None."""
        return self.get("delta")
