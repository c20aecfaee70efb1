"""The messages between an engine's process and its caller."""

import pickle
from typing import Literal, NamedTuple

from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.requests.logprobs import Entry
from nanovllm.engine.requests.measures import RequestTimes
from nanovllm.engine.requests.parts import Keeper, Wanted
from nanovllm.lora_request import LoRARequest
from nanovllm.models.config import ModelConfig
from nanovllm.outputs import FinishReason
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import GRAMMAR_SECONDS

NO_ARGUMENTS = pickle.dumps(((), {}))
NOTHING = pickle.dumps(None)


class SubmitRequest(NamedTuple):
    """Queue a request, with the caller's `number` for it. The caller finds its stop strings itself.

    `token_ids` are 32-bit integers, which are sent faster than a list. `wanted` is an argument of
    `Intake.accept`. `processors` are `logits_processors`, pickled: loading them may fail. A
    constraint must be compiled within `grammar_seconds`. `salt` is that of the accepted prompt.
    """

    number: int
    token_ids: bytes
    params: SamplingParams
    wanted: Wanted | None = None
    lora_request: LoRARequest | None = None
    processors: bytes | None = None
    grammar_seconds: float = GRAMMAR_SECONDS
    salt: int = 0


class DropRequest(NamedTuple):
    """End a request, as its caller has left."""

    number: int


class StopSample(NamedTuple):
    """End one sample, as the caller has found a stop in its text."""

    number: int
    sample: int


Question = Literal[
    "stats", "get_metrics", "check_adapter", "reset_prefix_cache",
    "begin_update", "load_weights", "end_update", "cancel_update", "reload_weights",
    "get_weights", "apply_model", "sleep", "wake_up", "is_sleeping",
    "start_profile", "stop_profile",
]  # fmt: skip


class Ask(NamedTuple):
    """A question to the engine.

    `arguments` are positional and keyword arguments of the call that answers it, pickled by value.
    If it is not answered `between_steps`, a thread answers it while steps go on.
    """

    number: int
    question: Question
    arguments: bytes = NO_ARGUMENTS
    between_steps: bool = True


class Quit(NamedTuple):
    """End the process, as the caller has closed its end of the socket."""


class EngineReady(NamedTuple):
    """The engine has started."""

    config: EngineConfig
    model_config: ModelConfig


class EngineFailed(NamedTuple):
    """The engine has ended, or has not started."""

    error: BaseException
    traceback: str


class NewTokens(NamedTuple):
    """One new token for each of these samples, which have request numbers and sample numbers.

    Nothing else is new about these samples. Most events are of this kind.
    """

    numbers: list[int]
    samples: list[int]
    token_ids: list[int]


class SampleProgress(NamedTuple):
    """New tokens of a sample, with their log-probabilities if requested, and how it has ended."""

    number: int
    sample: int
    token_ids: list[int]
    logprobs: list[Entry] | None
    reason: FinishReason | None
    stop_reason: int | str | None


class PromptProgress(NamedTuple):
    """Log-probabilities of a request's next prompt tokens, the first from the second token on."""

    number: int
    logprobs: list[Entry]


class RequestEnd(NamedTuple):
    """All samples of a request have ended. It has the results for the whole request.

    `keepers` are the keepers of its sequences, if it asked for hidden states.
    """

    number: int
    times: RequestTimes
    num_hit_tokens: int
    keepers: list[Keeper] | None = None


class RequestRefused(NamedTuple):
    """A request was not queued."""

    number: int
    error: Exception


class EngineAnswer(NamedTuple):
    """The answer to `Ask`: a value, pickled, or the error that the method has raised."""

    number: int
    value: bytes = NOTHING
    error: Exception | None = None


Command = SubmitRequest | DropRequest | StopSample | Ask | Quit
Event = NewTokens | PromptProgress | SampleProgress | RequestEnd | RequestRefused
