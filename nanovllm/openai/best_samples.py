"""The samples of an answer: all, the best of them, or none of their tokens."""

import math
from typing import Any

from nanovllm.openai.answer_form import AnswerForm
from nanovllm.outputs import CompletionOutput, RequestOutput


def returned_samples(output: RequestOutput, form: AnswerForm) -> list[CompletionOutput]:
    """The samples that an answer of this form has, in order."""
    samples: list[CompletionOutput] = output["outputs"]
    if form.num_best is not None:
        samples = sorted(samples, key=_mean_logprob, reverse=True)[: form.num_best]
        samples = [_changed(one, index=place) for place, one in enumerate(samples)]
    if form.hides_logprobs:
        samples = [_changed(one, logprobs=None) for one in samples]
    if form.prompt_only:
        samples = [_without_tokens(one) for one in samples]
    return samples


def _mean_logprob(sample: CompletionOutput) -> float:
    """The mean log-probability of its tokens; those that have failed are the last."""
    total = sample["cumulative_logprob"]
    if total is None or not sample["token_ids"] or sample["finish_reason"] == "error":
        return -math.inf
    return float(total) / len(sample["token_ids"])


def _without_tokens(sample: CompletionOutput) -> CompletionOutput:
    """A sample without what was generated; one that has failed stays."""
    if sample["finish_reason"] == "error":
        return sample
    likely: list[Any] | None = None if sample["logprobs"] is None else []
    return _changed(
        sample, text="", token_ids=[], logprobs=likely, finish_reason="length", stop_reason=None
    )


def _changed(sample: CompletionOutput, **fields: object) -> CompletionOutput:
    changed = CompletionOutput(**sample)
    changed.update(fields)
    return changed
