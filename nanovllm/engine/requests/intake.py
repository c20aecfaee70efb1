"""Intake: checks what users ask for against the model, and makes requests of it."""

from dataclasses import dataclass
from typing import Any

import xxhash

from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.requests.logprobs import Logprobs
from nanovllm.engine.requests.output_text import OutputText
from nanovllm.engine.requests.parts import Constraint, Constraints, Keeper, RequestParts, Wanted
from nanovllm.engine.requests.processors import Processors
from nanovllm.engine.requests.request import Request
from nanovllm.engine.requests.token_counts import TokenCounts
from nanovllm.engine.schedule.sequence import Sequence, SequenceParts
from nanovllm.models.config import NO_HEAD, ModelConfig
from nanovllm.prompts import Prompt, split_prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import StructuredOutputs
from nanovllm.utils.checks import as_list, check_int, check_text, shorten


@dataclass(frozen=True, slots=True)
class Accepted:
    """A prompt as token ids, its text if it has one, and its parameters: all fit the model.

    `constraint` is the compiled one of `structured_outputs`, which each sample has a copy of.
    `bad_words` are token ids. With a `keeper`, hidden states are wanted instead of tokens. An
    `adapter` changes the model's weights.
    """

    token_ids: list[int]
    text: str | None
    params: SamplingParams
    constraint: Constraint | None
    bad_words: tuple[tuple[int, ...], ...] = ()
    keeper: Keeper | None = None
    adapter: Any = None

    @property
    def wanted(self) -> Wanted | None:
        """What the keeper is for, if there is one."""
        return None if self.keeper is None else self.keeper.asked


class Intake:
    """Knows the model's vocabulary and length, and its tokenizer if it has one."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Any,
        makers: RequestParts,
    ) -> None:
        self.tokenizer, self._makers = tokenizer, makers
        self.vocab_size = model_config.vocab_size
        self.max_model_len = config.max_model_len
        self.seed = config.seed
        self.has_head = model_config.has_head
        eos_token_ids = set(model_config.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            eos_token_ids.add(tokenizer.eos_token_id)
        # The ids that the model can produce; a tokenizer may have more.
        self.eos_token_ids = frozenset(i for i in eos_token_ids if i < self.vocab_size)
        self._num_requests = 0
        self._constraints: Constraints | None = None  # when one is first asked for

    def accept(
        self, prompt: Prompt, params: SamplingParams, wanted: Wanted | None = None
    ) -> Accepted:
        """Encode the prompt, compile a constraint. What does not fit the model raises.

        With `wanted`, the prompt is computed for that, and nothing is generated.
        """
        if not self.has_head and (wanted is None or wanted.labels):
            raise ValueError(NO_HEAD)
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be a SamplingParams, got {shorten(params)}")
        self._check_params(params)
        source, text = split_prompt(prompt)
        token_ids = self._tokenize(source) if isinstance(source, str) else as_list("prompt", source)
        if params.truncate_prompt_tokens is not None:
            token_ids = token_ids[-self._num_kept(params.truncate_prompt_tokens, wanted) :]
        plain = set(map(type, token_ids)) <= {int}
        in_range = plain and min(token_ids, default=0) >= 0
        if not in_range or max(token_ids, default=0) >= self.vocab_size:
            token_ids = [check_int("prompt token id", t, 0, self.vocab_size - 1) for t in token_ids]
        most, why = self._longest(wanted)
        if not 1 <= len(token_ids) <= most:
            raise ValueError(f"prompt must have 1 to {most} tokens ({why}), got {len(token_ids)}")
        room = self.max_model_len - len(token_ids)
        if params.min_tokens > room:
            raise ValueError(
                f"min_tokens must be at most {room} (max_model_len={self.max_model_len} less"
                f" {len(token_ids)} prompt tokens), got {params.min_tokens}"
            )
        bad_words = self._bad_words(params)
        keeper = None if wanted is None else wanted.keeper(len(token_ids))
        return Accepted(token_ids, text, params, self._constraint(params), bad_words, keeper)

    def request(self, accepted: Accepted, streams: bool) -> Request:
        """Make a request of what `accept` returned. If it `streams`, its text is followed."""
        params = accepted.params
        number = self._num_requests.to_bytes(8, "little")
        self._num_requests += 1
        seqs: list[Sequence] = []
        for index in range(params.n):
            seq = Sequence(
                accepted.token_ids,
                params,
                index=index,
                request_id=seqs[0].request_id if seqs else None,
                eos_token_ids=self.eos_token_ids,
                max_model_len=self.max_model_len,
                default_seed=xxhash.xxh64_intdigest(number, seed=self.seed),
                parts=self._parts(accepted, index, streams),
            )
            seqs.append(seq)
        seqs[0].siblings = seqs[1:]
        return Request(seqs, accepted.text)

    def _parts(self, accepted: Accepted, index: int, streams: bool) -> SequenceParts:
        """What the features of a request keep for a sample."""
        params = accepted.params
        tokenizer = self.tokenizer if params.detokenize else None
        return SequenceParts(
            text=OutputText(tokenizer, params) if streams or params.stop else None,
            counts=TokenCounts() if params.penalizes else None,
            constraint=accepted.constraint and accepted.constraint.copy(),
            processors=Processors(calls) if (calls := params.logits_processors) else None,
            bad_words=accepted.bad_words,
            logprobs=_logprobs(accepted, index),
            keeper=accepted.keeper or self._keeper(accepted, index),
            adapter=accepted.adapter,
        )

    def _keeper(self, accepted: Accepted, index: int) -> Any:
        """What keeps the hidden states of a sample, if the request asks for them."""
        if not accepted.params.hidden_states:
            return None
        return self._makers.keeper(len(accepted.token_ids), keeps_prompt=index == 0)

    def _check_params(self, params: SamplingParams) -> None:
        """Check what depends on the model and its tokenizer."""
        last = self.vocab_size - 1
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None:
                check_int(name, getattr(params, name), 0, last + 1)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            check_int(f"{name}: a token id", max(getattr(params, name) or (0,)), 0, last)
        for name in ("bad_words", "stop"):
            if getattr(params, name) and self.tokenizer is None:
                raise ValueError(
                    f"{name}: there is no text, as the model directory has no tokenizer; pass"
                    " tokenizer=... when the engine is made"
                )
        if params.allowed_token_ids is not None:
            self._check_allowed(params)

    def _longest(self, wanted: Wanted | None) -> tuple[int, str]:
        """The most tokens of a prompt, and why: one less than the model's if tokens follow."""
        less, why = (0, "") if wanted else (1, " less one to generate")
        return self.max_model_len - less, f"max_model_len={self.max_model_len}{why}"

    def _num_kept(self, asked: int, wanted: Wanted | None) -> int:
        """How many of a prompt's last tokens `truncate_prompt_tokens` keeps."""
        most, why = self._longest(wanted)
        if asked > most:
            raise ValueError(f"truncate_prompt_tokens must be at most {most} ({why}), got {asked}")
        return most if asked == -1 else asked

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        """What `structured_outputs` ask for, if anything; raises if it is wrong."""
        asked = params.structured_outputs
        if asked is None:
            return None
        assert isinstance(asked, StructuredOutputs)
        if self._constraints is None:
            self._constraints = self._makers.constraints(
                self.tokenizer, self.vocab_size, self.eos_token_ids
            )
        return self._constraints.constraint(asked, () if params.ignore_eos else self.eos_token_ids)

    def _check_allowed(self, params: SamplingParams) -> None:
        """Refuse a list in which no token may come first."""
        left = set(params.allowed_token_ids or ())
        if params.min_tokens:
            left -= set() if params.ignore_eos else self.eos_token_ids
            left -= set(params.stop_token_ids or ())
        left -= {ids[0] for ids in self._bad_words(params) if len(ids) == 1}
        if not left:
            raise ValueError(
                "allowed_token_ids must hold more than bad_words, and with min_tokens more than"
                f" tokens that stop, got {shorten(params.allowed_token_ids)}"
            )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The token ids of bad words, both at the start of a text and after another word.

        Words with ids outside the model's vocabulary cannot come, and are left out.
        """
        texts = (start + word.lstrip(" ") for word in params.bad_words or () for start in ("", " "))
        encoded = (tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        size = self.vocab_size
        return tuple(dict.fromkeys(ids for ids in encoded if ids and max(ids) < size))

    def _tokenize(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(
                "prompt is text, but the model directory has no tokenizer; pass token ids,"
                " or tokenizer=... when the engine is made"
            )
        check_text("prompt", text)
        token_ids: list[int] = self.tokenizer.encode(text, verbose=False)  # we check the length
        return token_ids


def check_whole(params: SamplingParams) -> None:
    """Raise if what is asked for is in whole outputs alone, and not in the events of a stream."""
    if params.hidden_states:
        raise ValueError(
            "hidden_states must be False in a stream, whose events have none, got True"
        )


def _logprobs(accepted: Accepted, index: int) -> Logprobs | None:
    """What keeps log-probabilities, if they are asked for. The first sample has the prompt's."""
    params = accepted.params
    if params.logprobs is None and params.prompt_logprobs is None:
        return None
    asks = params.prompt_logprobs is not None and index == 0
    return Logprobs(len(accepted.token_ids) if asks else 0)
