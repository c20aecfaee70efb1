"""vLLM's keywords of calls of `LLM` and `AsyncLLM` that ours do not have, as in `options`."""

from nanovllm.utils.other_names import OtherName

TEXT_ONLY = "models are text only"

GENERATE = {  # keywords of `generate`
    "prompt_adapter_request": OtherName((None,), "see `lora_request`"),
    "guided_options_request": OtherName((None,), "see `structured_outputs` of `SamplingParams`"),
    "tokenization_kwargs": OtherName((None, {}), "see `truncate_prompt_tokens`"),
    "mm_processor_kwargs": OtherName((None, {}), TEXT_ONLY),
}

VECTOR_CALLS = {  # options of `embed`, `encode` and `score`
    "pooling_task": OtherName(
        (None,), "`embed` makes vectors, `encode` returns states; `pooling` chooses the tokens"
    ),
    "tokenization_kwargs": OtherName((None, {}), "see `truncate_prompt_tokens`"),
    "chat_template": OtherName((None,), "see `instruction`"),
}

CHAT = {  # keywords of `chat`
    "chat_template_content_format": OtherName(("auto",), "the template decides"),
    "tokenization_kwargs": OtherName((None, {}), "see `truncate_prompt_tokens`"),
    "mm_processor_kwargs": OtherName((None, {}), TEXT_ONLY),
}

PROMPT = {  # fields of prompts that are dicts; None is as if a field were left out
    **{
        name: OtherName((None, {}), TEXT_ONLY)
        for name in ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids")
    },
    "prompt_embeds": OtherName((None,), "prompts are texts or token ids"),
    "encoder_prompt": OtherName((None,), "models are decoders"),
    "decoder_prompt": OtherName((None,), "models are decoders"),
    "token_type_ids": OtherName((None,), "models have no types of tokens"),
}
