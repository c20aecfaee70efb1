"""SamplingParams: how one request is sampled and when it stops."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.utils import names_beside
from nanovllm.utils.checks import check_int, shorten
from nanovllm.utils.option import (
    NOTHING,
    TRUE_OR_FALSE,
    Rule,
    by_name,
    check_options,
    float_range,
    int_range,
    option,
)

if TYPE_CHECKING:
    from nanovllm.beam_search_params import BeamSearchParams as BeamSearchParams
    from nanovllm.output_kind import RequestOutputKind as RequestOutputKind
    from nanovllm.structured_outputs import StructuredOutputs
    from nanovllm.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
else:
    # The class is loaded when a request has such outputs, as a dict of this type.
    StructuredOutputs = Mapping[str, Any]
    __getattr__ = names_beside("sampling_params")


MAX_SAMPLES = 16_384  # each takes some kilobytes before anything is computed


def _listed(allowed: str) -> Rule:
    """A rule for several values. Its check is loaded when a request first has such values."""

    def check(name: str, value: Any) -> Any:
        from nanovllm.listed_values import CHECKS

        return CHECKS[name](name, value, allowed)

    return Rule(check, allowed)


def _other_names() -> Any:
    """vLLM's other names of parameters."""
    from nanovllm.from_vllm.names.options import SAMPLING

    return SAMPLING


COUNT = int_range(0)
KIND = _listed("a RequestOutputKind")
PENALTY = float_range(-2.0, 2.0)
KEPT = _listed("-1 or >= 1")
IDS = _listed("a list of token ids")
SOME_IDS = _listed("a list of token ids that is not empty")


@by_name("sampling parameter", _other_names, can_change=True)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request; docs/options.md lists them."""

    temperature: float = option(1.0, "divides the logits; 0 is greedy", float_range(0.0))
    top_k: int = option(
        -1,
        "draw from the k most likely tokens, of equally likely ones from the first; -1 and 0 draw"
        " from all",
        int_range(-1),
    )
    top_p: float = option(
        1.0,
        "draw from the fewest most likely tokens that together have this share of the probability",
        float_range(0.0, 1.0, above=True),
    )
    min_p: float = option(
        0.0,
        "draw from tokens with at least this share of the most likely token's probability",
        float_range(0.0, 1.0),
    )
    max_tokens: int | None = option(
        64, "most tokens to generate", int_range(1), none="as many as `max_model_len` leaves"
    )
    min_tokens: int = option(
        0, "tokens to generate before a token that stops the request may be sampled", COUNT
    )
    stop: str | Iterable[str] | None = option(
        None,
        "a text, or several, that end the output where one first occurs, and are cut off",
        _listed("a text or a list of texts"),
        none=NOTHING,
    )
    stop_token_ids: Iterable[int] | None = option(
        None,
        "further tokens that end the output; `token_ids` have them, the text does not",
        IDS,
        none=NOTHING,
    )
    ignore_eos: bool = option(
        False,
        "continue after the end-of-text tokens of the model's config and of the tokenizer",
        TRUE_OR_FALSE,
    )
    seed: int | None = option(
        None,
        "makes this request's samples reproducible by themselves",
        int_range(0, 2**63 - 1),
        none="the engine's",
    )
    n: int = option(
        1,
        "samples of the prompt, each with its own random stream; the prompt is computed once for"
        " all samples that can run at once, and shared",
        int_range(1, MAX_SAMPLES),
    )
    logprobs: int | None = option(
        None,
        "report the log-probability of each generated token and of this many of the most likely"
        " ones, before any parameter changes the distribution",
        COUNT,
        none=NOTHING,
    )
    prompt_logprobs: int | None = option(
        None,
        "the same for the prompt's tokens, except the first; the whole prompt is then computed,"
        " even if it is cached",
        COUNT,
        none=NOTHING,
    )
    hidden_states: bool = option(
        False,
        "return the hidden states after the final norm: of the prompt, which is then computed as a"
        " whole, and for each generated token the one that it was drawn from",
        TRUE_OR_FALSE,
        only_python=True,
    )
    repetition_penalty: float = option(
        1.0,
        "divides positive logits of tokens in the prompt or the output, and multiplies negative"
        " ones",
        float_range(0.01, 100.0),
    )
    presence_penalty: float = option(
        0.0, "subtracted from the logits of tokens in the output", PENALTY
    )
    frequency_penalty: float = option(
        0.0, "subtracted from the logits of tokens in the output, once for each occurrence", PENALTY
    )
    logit_bias: Mapping[int, float] | None = option(
        None,
        "numbers to add to the logits of tokens",
        _listed("a dict from token ids to numbers in [-100.0, 100.0]"),
        none=NOTHING,
    )
    allowed_token_ids: Iterable[int] | None = option(
        None, "the only tokens that may be sampled", SOME_IDS, none="all"
    )
    bad_words: Iterable[str] | None = option(
        None,
        "texts that may not be generated, with or without a space before them: the last token of"
        " a text may not follow its other tokens, unless `allowed_token_ids` leaves nothing else",
        _listed("a list of texts"),
        none=NOTHING,
    )
    structured_outputs: Mapping[str, Any] | StructuredOutputs | None = option(
        None,
        "what the output must be: JSON by a schema, a regular expression, a choice, a grammar; see"
        " docs/structured.md",
        _listed("a StructuredOutputs or a dict of its options"),
        none=NOTHING,
    )
    truncate_prompt_tokens: int | None = option(
        None,
        "keep this many of the prompt's last tokens, if it has more; -1 keeps as many as"
        " `max_model_len` allows with one generated token",
        KEPT,
        none="a prompt that is too long is an error",
    )
    detokenize: bool = option(
        True, "make text of the tokens; without it texts are empty", TRUE_OR_FALSE
    )
    logits_processors: Iterable[Callable[..., Any]] | None = option(
        None,
        "callables that change a row of logits before anything else does: `f(token_ids, logits)` or"
        " `f(prompt_token_ids, token_ids, logits)`, with the generated `token_ids`, returns logits;"
        " see docs/usage.md",
        _listed("a list of callables"),
        none=NOTHING,
        only_python=True,
    )
    include_stop_str_in_output: bool = option(
        False,
        "keep what ended the output in its text: the text of `stop`, or the token's",
        TRUE_OR_FALSE,
    )
    skip_special_tokens: bool = option(True, "leave special tokens out of the text", TRUE_OR_FALSE)
    skip_reading_prefix_cache: bool | None = option(
        None, "compute the whole prompt, cached or not", TRUE_OR_FALSE, NOTHING, only_python=True
    )
    output_kind: Any = option(
        None, "outputs of vLLM's classes: a RequestOutputKind", KIND, NOTHING, only_python=True
    )
    priority: int = option(
        0,
        "requests with a lower number are admitted sooner and keep their KV blocks longer; a"
        " running request is only stopped for them if there are no free blocks, and a request with"
        " a higher number waits as long as lower ones arrive",
        int_range(-(2**63), 2**63 - 1),
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_tokens is not None:
            check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.stop and not self.detokenize:
            raise ValueError(
                "stop must be None with detokenize=False, which makes no text to look for it, got"
                f" {shorten(self.stop)}; see stop_token_ids"
            )

    def clone(self) -> "SamplingParams":
        """A copy; changes of one are not seen by the other."""
        return copy.copy(self)

    def __hash__(self) -> int:
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return hash(tuple(frozenset(v.items()) if isinstance(v, dict) else v for v in values))

    @property
    def penalizes(self) -> bool:
        """Whether tokens are penalized for having occurred before."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def cuts(self) -> bool:
        """Whether `top_k`, `top_p` or `min_p` leave only part of the distribution to draw from."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def narrows(self) -> bool:
        """Whether any parameter changes or restricts the choice of every token.

        Bad words, callables and structured outputs are not considered.
        """
        return bool(self.allowed_token_ids or self.logit_bias) or self.penalizes or self.cuts
