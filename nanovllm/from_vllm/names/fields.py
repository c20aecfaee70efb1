"""Fields of requests that other servers have, and that are not fields here.

Each accepts the values that ask for what this server always does; another value is an error that
says what to use. docs/from_vllm.md shows this table.
"""

from nanovllm.from_vllm.names.options import SAMPLING
from nanovllm.utils.other_names import OtherName

TEXT_ONLY = OtherName((None, {}), "models are text only")
NO_TRANSFER = OtherName((None, {}), "caches stay in their engine")
LAST_KEPT = OtherName((None, "left"), "`truncate_prompt_tokens` keeps the last tokens")
NO_OFFSETS = OtherName(
    (None, False), "`/tokenize` with `return_token_strs` gives the texts of tokens"
)

SHARED = (  # with `SamplingParams`
    "spaces_between_special_tokens", "logprob_token_ids", "repetition_detection",
    "guided_decoding_backend",
)  # fmt: skip
GENERATION = {  # of chats and completions
    **{name: SAMPLING[name] for name in SHARED},
    "truncation_side": LAST_KEPT,
    "return_token_offsets": NO_OFFSETS,
    "kv_transfer_params": NO_TRANSFER,
    "ec_transfer_params": NO_TRANSFER,
    "vllm_xargs": OtherName((None, {}), "nothing here reads further arguments"),
    "mm_processor_kwargs": TEXT_ONLY,
    "media_io_kwargs": TEXT_ONLY,
}
OF_CHATS = {
    "echo": OtherName((None, False), "join the last message and the answer yourself"),
    "best_of": OtherName((None, 1), "it is for /v1/completions; see `n`"),
    "return_prompt_text": OtherName(
        (None, False), "`return_token_ids` gives the prompt's token ids; see `/detokenize`"
    ),
    "return_assistant_tokens_mask": OtherName((None, False), "answers have their `token_ids`"),
    "functions": OtherName((None, []), "see `tools`"),
    "function_call": OtherName((None,), "see `tool_choice`"),
    "prompt": OtherName((None,), "a chat has `messages`; /v1/completions takes a prompt"),
    "modalities": OtherName((None, ["text"]), "models are text only"),
    "audio": OtherName((None,), "models are text only"),
    "prediction": OtherName((None,), "see `speculative_config` of the engine"),
    "verbosity": OtherName((None,), "ask for it in a message"),
    "web_search_options": OtherName((None,), "see `tools`"),
}
OF_COMPLETIONS = {
    "suffix": OtherName((None, ""), "write the model's tokens for infilling into the prompt"),
    "prompt_embeds": OtherName((None,), "a prompt is a text or token ids"),
    "thinking_token_budget": OtherName((None,), "it is for chats"),
    "messages": OtherName((None,), "a completion has a `prompt`; chats take messages"),
}
POOLED = {  # of embeddings and scores
    "truncation_side": LAST_KEPT,
    "priority": OtherName((None, 0), "it is for chats and completions"),
    "mm_processor_kwargs": TEXT_ONLY,
}
OF_EMBEDDINGS = {
    "add_special_tokens": OtherName((None, True), "give token ids as `input`; see `/tokenize`"),
    "embed_dtype": OtherName((None, "float32"), "numbers have 32 bits; see `encoding_format`"),
    "endianness": OtherName((None, "native", "little"), "see `encoding_format`"),
    "messages": OtherName((None,), "`/tokenize` makes token ids of `messages`, for `input`"),
}
OF_SCORES = {
    "use_activation": OtherName((None, True), "scores are probabilities or cosines; see `method`"),
    "max_tokens_per_query": OtherName((None, 0), "see `truncate_prompt_tokens`"),
    "max_tokens_per_doc": OtherName((None, 0), "see `truncate_prompt_tokens`"),
    "chat_template_kwargs": OtherName((None, {}), "see `instruction`"),
    "rank_fields": OtherName((None, []), "a document is a text, or an object with a `text`"),
}

CHATS, COMPLETION = GENERATION | OF_CHATS, GENERATION | OF_COMPLETIONS
EMBEDDING, SCORING = POOLED | OF_EMBEDDINGS, POOLED | OF_SCORES
