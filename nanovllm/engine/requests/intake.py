"""Intake: checks prompts and parameters against the model, and makes requests of them."""

import functools
from collections.abc import Collection
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import xxhash

from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.requests.output_text import OutputText
from nanovllm.engine.requests.request import Request
from nanovllm.engine.schedule.parts import SequenceParts
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.models.config import NO_HEAD, ModelConfig
from nanovllm.prompts import Prompt, split_prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import as_list, check_int, check_text, shorten

if TYPE_CHECKING:
    from nanovllm.engine.features import Features, RequestAdapters
    from nanovllm.engine.requests.bad_words import BadWords
    from nanovllm.engine.requests.extras import Extras
    from nanovllm.engine.requests.parts import Constraint, Keeper, Wanted
    from nanovllm.lora_request import LoRARequest, LoRARequests

SHARE = 4  # while others run or wait, a request has at most 1 / SHARE of the places, or two
LONG_TEXT = 100_000  # characters; the length of a longer text is checked before it is tokenized


@dataclass(frozen=True, slots=True)
class Accepted:
    """A prompt as token ids, its text if it has one, and its parameters: all fit the model.

    `constraint` is compiled from `structured_outputs`; each sample gets a copy. All samples share
    `bad_words`. With a `keeper`, hidden states are wanted instead of tokens. An `adapter` changes
    the model's weights. Only prompts with the same `salt` share cached prefixes.
    """

    token_ids: list[int]
    text: str | None
    params: SamplingParams
    constraint: "Constraint | None"
    bad_words: "BadWords | None" = None
    keeper: "Keeper | None" = None
    adapter: Any = None
    salt: int = 0

    @property
    def wanted(self) -> "Wanted | None":
        """The results that the keeper was made for, if there is one."""
        return None if self.keeper is None else self.keeper.asked


class Intake:
    """Checks prompts and makes requests, by the model's limits, tokenizer and adapters."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Any,
        features: "Features",
        adapters: "RequestAdapters",
    ) -> None:
        self.tokenizer, self._features, self._adapters = tokenizer, features, adapters
        self.vocab_size = model_config.vocab_size
        self.max_model_len, self._num_places = config.max_model_len, config.max_num_running
        self.seed, self._modes = config.seed, (config.logprobs_mode, config.scheduling_policy)
        self.has_head = model_config.has_head
        eos_token_ids = set(model_config.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            eos_token_ids.add(tokenizer.eos_token_id)
        # The ids that the model can produce; a tokenizer may have more.
        self.eos_token_ids = frozenset(i for i in eos_token_ids if i < self.vocab_size)
        self._num_requests = 0

    def accept(
        self,
        prompt: Prompt,
        params: SamplingParams,
        wanted: "Wanted | None" = None,
        lora_request: "LoRARequest | None" = None,
    ) -> Accepted:
        """Encode the prompt, compile a constraint, read an adapter; raise if one does not fit.

        With `wanted`, the prompt is computed for these results, and nothing is generated.
        """
        return self.adapted(self._accept(prompt, copy(params), wanted), lora_request)

    def accept_all(
        self, asked: Collection[tuple[Prompt, SamplingParams]], lora_request: "LoRARequests"
    ) -> list[Accepted]:
        """Accept prompts with their parameters; an error names the prompt that it is about."""
        accepted, known = list[Accepted](), dict["LoRARequest", Any]()
        adapters: list[LoRARequest | None] = [None] * len(asked)
        if lora_request is not None:
            from nanovllm.lora_request import lora_requests

            adapters = lora_requests(lora_request, len(asked))
        for index, (prompt, params) in enumerate(asked):
            try:
                one = self._accept(prompt, params)
                accepted.append(self.adapted(one, adapters[index], known))
            except (TypeError, ValueError) as error:
                raise type(error)(f"prompts[{index}]: {error}") from None
        return accepted

    def adapted(
        self,
        accepted: Accepted,
        lora_request: "LoRARequest | None",
        known: "dict[LoRARequest, Any] | None" = None,
    ) -> Accepted:
        """The prompt with its adapter, which is read and checked.

        `known` has the adapters of the call's earlier prompts: each adapter is read once.
        """
        if lora_request is None:
            return accepted
        from nanovllm.lora_request import read_once

        return replace(accepted, adapter=read_once(self._adapters.read, lora_request, known))

    def compiles(self, params: SamplingParams) -> bool:
        """Whether `accept` will compile a constraint, which may take long."""
        return (extras := self._extras_of(params)) is not None and extras.compiles(params)

    def _accept(
        self, prompt: Prompt, params: SamplingParams, wanted: "Wanted | None" = None
    ) -> Accepted:
        if not self.has_head and (wanted is None or wanted.labels):
            raise ValueError(NO_HEAD)
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be a SamplingParams, got {shorten(params)}")
        if (extras := self._extras_of(params)) is not None:
            extras.check(params)
        source, text, salt = split_prompt(prompt)
        limit = most, why = self._longest(wanted)
        is_text = isinstance(source, str)
        token_ids = self._tokenize(source, params, *limit) if is_text else as_list("prompt", source)
        if (kept := params.truncate_prompt_tokens) is not None:
            from nanovllm.engine.requests.prompt_length import last_tokens

            token_ids = last_tokens(token_ids, kept, *limit)
        room = self.max_model_len - len(token_ids)
        if not 1 <= len(token_ids) <= most or params.min_tokens > room:
            from nanovllm.engine.requests.prompt_length import refuse_prompt

            refuse_prompt(len(token_ids), most, why, params.min_tokens, self.max_model_len)
        plain = set(map(type, token_ids)) <= {int}
        in_range = plain and min(token_ids, default=0) >= 0
        if not in_range or max(token_ids, default=0) >= self.vocab_size:
            token_ids = [check_int("prompt token id", t, 0, self.vocab_size - 1) for t in token_ids]
        bad_words = None if extras is None else extras.bad_words(params)
        constraint = None if extras is None else extras.constraint(params)
        keeper = None if wanted is None else wanted.keeper(len(token_ids))
        return Accepted(token_ids, text, params, constraint, bad_words, keeper, salt=salt)

    def request(self, accepted: Accepted, streams: bool) -> Request:
        """Make a request of what `accept` returned. If it `streams`, its text is followed."""
        params, prompt = accepted.params, accepted.token_ids
        if params.n > 1:
            from nanovllm.engine.requests.sample_tokens import shared

            prompt = shared(prompt, params.n)
        seed = xxhash.xxh64_intdigest(self._num_requests.to_bytes(8, "little"), seed=self.seed)
        self._num_requests += 1
        seqs: list[Sequence] = []
        for index in range(params.n):
            seq = Sequence(
                prompt, params, index=index, first=seqs[0] if seqs else None,
                eos_token_ids=self.eos_token_ids, max_model_len=self.max_model_len,
                default_seed=seed, parts=self._parts(accepted, index, streams),
            )  # fmt: skip
            seqs.append(seq)
        if params.n > (share := max(2, self._num_places // SHARE)):
            from nanovllm.engine.requests.sample_limit import limit_samples

            limit_samples(seqs, self._num_places, share)
        seqs[0].siblings = seqs[1:]
        return Request(seqs, accepted.text)

    def _parts(self, accepted: Accepted, index: int, streams: bool) -> SequenceParts:
        """Make the parts that the features of a request keep for a sample."""
        params, parts = accepted.params, SequenceParts()
        if (extras := self._extras_of(params)) is not None:
            parts = extras.parts(params, accepted.constraint, len(accepted.token_ids), index)
            parts.bad_words = accepted.bad_words
        if streams or params.stop:
            parts.text = self._text(params)
        parts.keeper = accepted.keeper or parts.keeper
        parts.adapter, parts.salt = accepted.adapter, accepted.salt
        return parts

    def _text(self, params: SamplingParams) -> OutputText:
        """Make the follower with the text of a sample."""
        kind = OutputText
        if params.stop:
            from nanovllm.engine.requests.stop_text import TextUntilStop

            kind = TextUntilStop
        return kind(self.tokenizer if params.detokenize else None, params)

    def _extras_of(self, params: SamplingParams) -> "Extras | None":
        """The `Extras` if the parameters need them; None if they do not."""
        return self._extras if asks_more(params) else None

    @functools.cached_property
    def _extras(self) -> "Extras":
        from nanovllm.engine.requests.extras import Extras

        ids = self.vocab_size, self.eos_token_ids
        return Extras(self.tokenizer, *ids, self._features, *self._modes)

    def _longest(self, wanted: "Wanted | None") -> tuple[int, str]:
        """The most tokens of a prompt, and why: one less than the model's if tokens follow."""
        less, why = (0, "") if wanted else (1, " less one to generate")
        return self.max_model_len - less, f"max_model_len={self.max_model_len}{why}"

    def _tokenize(self, text: str, params: SamplingParams, most: int, why: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(
                "prompt is text, but the model directory has no tokenizer; pass token ids,"
                " or tokenizer=... when the engine is made"
            )
        check_text("prompt", text)
        if len(text) > LONG_TEXT and params.truncate_prompt_tokens is None:
            from nanovllm.engine.requests.text_bound import check_long_text

            check_long_text(self.tokenizer, text, most, why)
        token_ids: list[int] = self.tokenizer.encode(text, verbose=False)  # we check the length
        return token_ids


def asks_more(params: SamplingParams) -> bool:
    """Whether parameters need `Extras`: for lists, words, reports or callables."""
    return bool(
        params.penalizes
        or params.logprobs is not None
        or params.prompt_logprobs is not None
        or params.allowed_token_ids is not None
        or params.structured_outputs is not None
        or params.hidden_states
        or params.skip_reading_prefix_cache
        or params.priority
        or any((params.stop, params.stop_token_ids, params.logit_bias, params.bad_words))
        or params.logits_processors
    )


def check_whole(params: SamplingParams) -> None:
    """Raise if parameters ask for results that only whole outputs have, and no stream events."""
    if params.hidden_states:
        raise ValueError("hidden_states must be False in a stream, whose events have none")
    if params.output_kind is not None:
        raise ValueError("output_kind is for llm.llm_engine and AsyncLLM; see docs/from_vllm.md")
