"""AsyncBeams: beam search with an engine in another process, among its other requests."""

from dataclasses import replace
from typing import Any

from nanovllm.beam_search_params import BeamSearchParams
from nanovllm.beams.beams import STEP, check_logprobs
from nanovllm.beams.search import FinishedBeam, Search
from nanovllm.engine.errors import NotReadyError
from nanovllm.engine.remote.async_engine import AsyncEngine
from nanovllm.engine.remote.readers import prompt_size
from nanovllm.engine.requests.intake import Accepted
from nanovllm.lora_request import LoRARequest
from nanovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.tasks import all_of


class AsyncBeams:
    """Searches by requests of one token each, which find their tokens in the prefix cache."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def search(
        self,
        prompt: Any,
        params: BeamSearchParams,
        sampling: SamplingParams,
        lora_request: LoRARequest | None,
    ) -> RequestOutput:
        """The `beam_width` most likely answers to a prompt, the best first, as its samples.

        `sampling` says what of the text is shown, how the prompt is cut, and its priority.
        """
        engine = self._engine
        check_logprobs(engine.config)
        engine.check_lora(lora_request)
        engine.check()
        step = replace(STEP, truncate_prompt_tokens=sampling.truncate_prompt_tokens)
        accepted = await engine.readers.run(
            lambda: engine.intake.accept(prompt, step), prompt_size(prompt)
        )
        longest, eos = engine.config.max_model_len, engine.intake.eos_token_ids
        room = longest - len(accepted.token_ids)
        search = Search(params, min(params.max_tokens, room), eos)
        number = min(search.num_candidates, engine.model_config.vocab_size)
        one_token = replace(STEP, logprobs=number, priority=sampling.priority)
        with engine.open_requests.room(params.beam_width):
            while not search.is_over:
                likely = [
                    self._likely(accepted, beam.token_ids, one_token, lora_request)
                    for beam in search.running
                ]
                search.advance(await all_of(likely))
        samples = [
            self._sample(index, one, params, sampling) for index, one in enumerate(search.ended)
        ]
        return _output(accepted, samples)

    async def _likely(
        self,
        accepted: Accepted,
        token_ids: list[int],
        params: SamplingParams,
        lora_request: LoRARequest | None,
    ) -> list[tuple[int, float]]:
        """The most likely tokens after a beam, with their log-probabilities."""
        asked = replace(accepted, token_ids=accepted.token_ids + token_ids, params=params)
        queued = self._engine.queued(asked, params, lora_request=lora_request, is_counted=False)
        async with queued as request:
            output = await request.output()
        (sample,) = output["outputs"]
        if sample["finish_reason"] == "error":
            raise ValueError(str(sample["stop_reason"]))
        if sample["finish_reason"] == "abort":
            raise NotReadyError("a step of the search was aborted")
        (entry,) = sample["logprobs"]
        return [(token["token_id"], token["logprob"]) for token in entry]

    def _sample(
        self, index: int, ended: FinishedBeam, params: BeamSearchParams, sampling: SamplingParams
    ) -> CompletionOutput:
        shown, has_stopped = ended.token_ids, ended.reason == "stop"
        if has_stopped and not params.include_stop_str_in_output:
            shown = shown[:-1]
        skips = sampling.skip_special_tokens
        return CompletionOutput(
            index=index,
            text=self._engine.tokenizer.decode(shown, skip_special_tokens=skips),
            token_ids=ended.token_ids,
            finish_reason=ended.reason,
            stop_reason=None,
            logprobs=None,
            cumulative_logprob=ended.logprob,
        )


def _output(accepted: Accepted, samples: list[CompletionOutput]) -> RequestOutput:
    """The output of a prompt with these samples. A search keeps no times."""
    first = {name: value for name, value in samples[0].items() if name != "index"}
    metrics = RequestMetrics(
        queue_time=None, time_to_first_token=None, time_per_output_token=None, end_to_end_time=0.0,
        prefill_time=None, decode_time=None, num_preemptions=0,
    )  # fmt: skip
    return RequestOutput(
        **first,
        request_id=0,
        prompt=accepted.text,
        prompt_token_ids=accepted.token_ids,
        outputs=samples,
        num_prompt_tokens=len(accepted.token_ids),
        num_cached_tokens=0,
        prompt_logprobs=None,
        metrics=metrics,
    )
