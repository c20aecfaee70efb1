"""Keywords of vLLM's `LLM.generate` that ours does not name: token ids and priorities."""

from collections.abc import Mapping
from typing import Any

from nanovllm.engine.requests.generation import params_list
from nanovllm.engine.requests.given_priority import with_priority
from nanovllm.from_vllm.names.calls import GENERATE
from nanovllm.prompts import prompt_list
from nanovllm.utils.checks import NOT_LISTS, as_list, check_int, shorten
from nanovllm.utils.other_names import own_names

FIELDS = (
    "prompts", "sampling_params", "use_tqdm", "lora_request", "prompt_token_ids", "priority",
)  # fmt: skip


def generate_inputs(prompts: Any, params: Any, given: dict[str, Any]) -> tuple[list[Any], Any]:
    """The prompts and parameters of a call with these further keywords."""
    given = own_names("keyword of generate", FIELDS, GENERATE, given)
    token_ids, priority = given.get("prompt_token_ids"), given.get("priority")
    if prompts is None and token_ids is None:
        raise TypeError("generate needs prompts, got None")
    items = prompt_list("prompts", prompts) if token_ids is None else _merged(prompts, token_ids)
    if priority is None:
        return items, params
    if not hasattr(priority, "__iter__") or isinstance(priority, NOT_LISTS):
        raise TypeError(
            f"priority must be a list with an int for each prompt, got {shorten(priority)}"
        )
    numbers = as_list("priority", priority, "a list with an int for each prompt")
    if len(numbers) != len(items):
        raise ValueError(
            f"priority must be as many as prompts ({len(items)}), got {len(numbers)}; one value"
            " for all is a field of SamplingParams"
        )
    numbers = [check_int("priority", number, -(2**63), 2**63 - 1) for number in numbers]
    pairs = zip(params_list(params, len(items)), numbers, strict=True)
    return items, [with_priority(one, number) for one, number in pairs]


def _merged(prompts: Any, token_ids: Any) -> list[Any]:
    """Prompts of token ids, with their texts if these are given too."""
    ids = prompt_list("prompt_token_ids", token_ids)
    if any(isinstance(one, str | Mapping) for one in ids):
        raise TypeError(f"prompt_token_ids must be lists of token ids, got {shorten(token_ids)}")
    texts = [None] * len(ids) if prompts is None else prompt_list("prompts", prompts)
    if len(texts) != len(ids):
        raise ValueError(
            f"prompt_token_ids must be as many as prompts ({len(texts)}), got {len(ids)}"
        )
    for text in texts:
        if not isinstance(text, str | None):
            raise TypeError(
                f"prompts must be texts where prompt_token_ids are given, got {shorten(text)}"
            )
    return [dict(prompt_token_ids=one, prompt=text) for one, text in zip(ids, texts, strict=True)]
