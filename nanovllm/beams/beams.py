"""Beams: an engine searches the most likely outputs."""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from nanovllm.beam_search_params import BeamSearchParams
from nanovllm.beams.outputs import BeamSearchOutput, BeamSearchSequence
from nanovllm.beams.search import FinishedBeam, Search
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.exclusive import exclusive
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.requests.generation import check_call, run_until_done
from nanovllm.engine.requests.intake import Accepted
from nanovllm.engine.requests.progress import progress_bar
from nanovllm.engine.requests.request import check_no_error
from nanovllm.lora_request import LoRARequests
from nanovllm.prompts import Prompt, prompt_list
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int, shorten

STEP = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


def check_logprobs(config: EngineConfig) -> None:
    """Raise if an engine with these options does not return what a search adds up."""
    if (mode := config.logprobs_mode) != "raw_logprobs":
        raise ValueError(f"beam_search needs logprobs_mode='raw_logprobs', got {mode!r}")


class Beams:
    """`search`, by requests of one token each that find their tokens in the prefix cache."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine

    def search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequests,
        use_tqdm: bool,
        concurrency_limit: int | None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` most likely outputs of every prompt."""
        check_call(self.engine, use_tqdm)
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be a BeamSearchParams, got {shorten(params)}")
        check_logprobs(self.engine.config)
        if concurrency_limit is not None:
            check_int("concurrency_limit", concurrency_limit, 1)
        given = prompt_list("prompts", prompts)
        accepted = self.engine.intake.accept_all([(prompt, STEP) for prompt in given], lora_request)
        limit = concurrency_limit or max(1, len(accepted))
        outputs: list[BeamSearchOutput] = []
        bar = progress_bar(self.engine, len(accepted), "Searching") if use_tqdm else nullcontext()
        with bar as shown:
            for start in range(0, len(accepted), limit):
                outputs += self._search(accepted[start : start + limit], params)
                if shown is not None:
                    shown.n = len(outputs)
        return outputs

    @exclusive
    def _search(self, prompts: list[Accepted], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Search all these prompts at once, step by step."""
        longest, eos = self.engine.config.max_model_len, self.engine.eos_token_ids
        searches = [
            Search(params, min(params.max_tokens, longest - len(p.token_ids)), eos) for p in prompts
        ]
        going = list(zip(prompts, searches, strict=True))
        while going:
            found = iter(self._likely_tokens(going))
            for _, search in going:
                search.advance([next(found) for _ in search.running])
            going = [pair for pair in going if not pair[1].is_over]
        return [
            self._output(prompt, search, params)
            for prompt, search in zip(prompts, searches, strict=True)
        ]

    def _likely_tokens(self, going: list[tuple[Accepted, Search]]) -> list[list[tuple[int, float]]]:
        """The most likely tokens after all running sequences, with their log-probabilities."""
        vocab_size = self.engine.model_config.vocab_size
        number = min(going[0][1].num_candidates, vocab_size)  # all have the same
        params = replace(STEP, logprobs=number)
        ids = [
            self.engine.enqueue(
                replace(prompt, token_ids=prompt.token_ids + beam.token_ids, params=params)
            )
            for prompt, search in going
            for beam in search.running
        ]
        run_until_done(self.engine, ids, False, "")
        likely = []
        for request_id in ids:
            seq = self.engine.requests.finished[request_id].seqs[0]
            check_no_error(seq)
            (entry,) = seq.parts.logprobs.generated(seq, seq.num_prompt_tokens)
            likely.append([(token_id, logprob) for token_id, logprob, _ in entry])
            self.engine.requests.drop_output(request_id)
        return likely

    def _output(
        self, prompt: Accepted, search: Search, params: BeamSearchParams
    ) -> BeamSearchOutput:
        sequences = [self._sequence(prompt.token_ids, one, params) for one in search.ended]
        return BeamSearchOutput(
            sequences=sequences, prompt=prompt.text, prompt_token_ids=prompt.token_ids
        )

    def _sequence(
        self, prompt: list[int], ended: FinishedBeam, params: BeamSearchParams
    ) -> BeamSearchSequence:
        kept = ended.token_ids
        if ended.reason == "stop" and not params.include_stop_str_in_output:
            kept = kept[:-1]
        tokens, tokenizer = prompt + kept, self.engine.tokenizer
        text: Any = "" if tokenizer is None else tokenizer.decode(tokens)
        return BeamSearchSequence(
            tokens=tokens,
            text=text,
            token_ids=ended.token_ids,
            cum_logprob=ended.logprob,
            score=ended.score,
            finish_reason=ended.reason,
            stop_reason=ended.token_ids[-1] if ended.reason == "stop" else None,
        )
