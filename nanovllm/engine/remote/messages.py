"""The messages between an engine's process and its caller."""

import pickle
from typing import TYPE_CHECKING, Literal, NamedTuple

from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.requests.logprobs import LikelyToken
from nanovllm.engine.requests.timing import RequestTimes
from nanovllm.lora_request import LoRARequest
from nanovllm.models.config import ModelConfig
from nanovllm.outputs import FinishReason
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:  # it imports PyTorch
    from nanovllm.engine.requests.parts import Wanted
    from nanovllm.vectors.generated_states import GeneratedStates
    from nanovllm.vectors.kept_states import KeptStates

NO_ARGUMENTS = pickle.dumps(((), {}))
NOTHING = pickle.dumps(None)


class Submit(NamedTuple):
    """Queue a request. `number` is the caller's name for it; stop strings are left to the caller.

    `token_ids` are 32-bit integers, which travel faster than a list. With `wanted` nothing is
    generated. `processors` are `logits_processors`, pickled: loading them may fail.
    """

    number: int
    token_ids: bytes
    params: SamplingParams
    wanted: "Wanted | None" = None
    lora_request: LoRARequest | None = None
    processors: bytes | None = None


class Drop(NamedTuple):
    """End a request: its caller has gone."""

    number: int


class Stop(NamedTuple):
    """End one sample: the caller has found a stop in its text."""

    number: int
    sample: int


Question = Literal[
    "stats", "get_metrics", "check_adapter", "reset_prefix_cache",
    "begin_update", "load_weights", "end_update", "cancel_update", "reload_weights",
    "get_weights", "apply_model", "sleep", "wake_up", "is_sleeping",
    "start_profile", "stop_profile",
]  # fmt: skip


class Ask(NamedTuple):
    """A question to the engine, which answers between two steps.

    `arguments` are positional and keyword arguments of the call that answers it, pickled by value.
    If it is asked `beside`, that is called in a thread, while steps go on.
    """

    number: int
    question: Question
    arguments: bytes = NO_ARGUMENTS
    beside: bool = False


class Quit(NamedTuple):
    """End the process: the caller has closed its end of the socket."""


class Ready(NamedTuple):
    """The engine has started."""

    config: EngineConfig
    model_config: ModelConfig


class Failed(NamedTuple):
    """The engine has ended, or has not started."""

    error: BaseException
    traceback: str


class Tokens(NamedTuple):
    """A token of each of these samples, whose requests have these numbers: most of what comes.

    Nothing else is new of these samples.
    """

    numbers: list[int]
    samples: list[int]
    token_ids: list[int]


class Progress(NamedTuple):
    """New tokens of a sample, with their log-probabilities if asked for, and how it has ended."""

    number: int
    sample: int
    token_ids: list[int]
    logprobs: list[list[LikelyToken]] | None
    reason: FinishReason | None
    stop_reason: int | str | None


class Ended(NamedTuple):
    """All samples of a request have ended: what is known of it as a whole.

    `pool` has what was wanted of a prompt that generates nothing, and `states` the hidden states of
    each sample, where they were asked for.
    """

    number: int
    times: RequestTimes
    num_hit_tokens: int
    prompt_logprobs: list[list[LikelyToken]] | None
    pool: "KeptStates | None" = None
    states: "list[GeneratedStates] | None" = None


class Refused(NamedTuple):
    """A request was not queued."""

    number: int
    error: Exception


class Answer(NamedTuple):
    """The answer to `Ask`: a value, pickled, or the error that the method has raised."""

    number: int
    value: bytes = NOTHING
    error: Exception | None = None


Command = Submit | Drop | Stop | Ask | Quit
Event = Tokens | Progress | Ended | Refused
