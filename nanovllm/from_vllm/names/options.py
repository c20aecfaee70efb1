"""vLLM's names of options and of sampling and pooling parameters that are not fields here.

Some are other names of fields. The others accept only the values that ask for what nanovllm always
does; other values are errors that say what to use. docs/from_vllm.md shows these tables.
"""

from nanovllm.from_vllm.names.accepted import OF_N
from nanovllm.from_vllm.names.engine import CACHES, PLACES, SPECULATION, STEPS
from nanovllm.from_vllm.names.models import ADAPTERS, INPUTS, LOGS, MODELS, OUTPUTS
from nanovllm.utils.other_names import OtherName

NOT_HERE = "not supported"

ENGINE = {
    **CACHES, **STEPS, **SPECULATION, **PLACES, **MODELS, **ADAPTERS, **INPUTS, **OUTPUTS, **LOGS,
}  # fmt: skip

COMMON = (  # options that scripts give most; docs/from_vllm.md has them first
    "block_size", "num_gpu_blocks_override", "async_scheduling", "tool_call_parser", "policy",
    "trust_remote_code", "enable_chunked_prefill", "generation_config", "max_logprobs",
    "swap_space", "cpu_offload_gb", "limit_mm_per_prompt", "task", "runner", "convert",
    "tokenizer_mode", "hf_overrides", "rope_scaling", "pipeline_parallel_size",
    "data_parallel_size", "distributed_executor_backend", "compilation_config",
    "disable_log_stats", "served_model_name", "structured_outputs_config",
    "guided_decoding_backend", "enable_auto_tool_choice", "speculative_model",
    "num_speculative_tokens", "disable_custom_all_reduce", "kv_transfer_config",
)  # fmt: skip

SAMPLING = {
    "best_of": OtherName((None, OF_N), "it must be `n`, as all samples are returned"),
    "spaces_between_special_tokens": OtherName((True,), "the tokenizer decides"),
    "guided_decoding": OtherName((None,), "see `structured_outputs`"),
    "guided_decoding_backend": OtherName((None,), "llguidance makes all constraints"),
    **{
        f"guided_{kind}": OtherName((None,), f"it is `{kind}` of `structured_outputs`")
        for kind in ("json", "regex", "choice", "grammar", "whitespace_pattern")
    },
    "guided_json_object": OtherName((None, False), "it is `json_object` of `structured_outputs`"),
    "structural_tag": OtherName((None,), "it is `structural_tag` of `structured_outputs`"),
    "logprob_token_ids": OtherName((None,), "see `logprobs` and `allowed_token_ids`"),
    "flat_logprobs": OtherName((False,), "logprobs are lists of dicts"),
    "use_beam_search": OtherName((False,), "see `LLM.beam_search`"),
    "early_stopping": OtherName((False,), "see `BeamSearchParams`"),
    "length_penalty": OtherName((1, 1.0), "see `BeamSearchParams`"),
    "stream_interval": OtherName((None, 1), "each step gives each sequence its tokens"),
    "skip_clone": OtherName((False, True), "an engine keeps a copy"),
    "prompt_logprob_token_ids": OtherName((None,), "see `prompt_logprobs`"),
    "prompt_logprob_start": OtherName((None,), "see `prompt_logprobs`"),
    "routed_experts_prompt_start": OtherName((0,), NOT_HERE),
    "trace_decode_token_ids": OtherName((None,), NOT_HERE),
    "thinking_token_budget": OtherName(
        (None,), "chats have this field; see `after_tokens` of `StructuredOutputs`"
    ),
    "repetition_detection": OtherName((None,), "see `repetition_penalty` and `stop`"),
    "extra_args": OtherName((None, {}), NOT_HERE),
}

POOLING = {
    "use_activation": OtherName(ours="normalize"),
    "activation": OtherName(ours="normalize"),
    "softmax": OtherName((None,), "scores are probabilities or cosines; see `method` of `score`"),
    "task": OtherName((None,), "the call decides: `embed`, `encode` or `score`"),
    "truncation_side": OtherName((None, "left"), "the last tokens are kept"),
    "skip_reading_prefix_cache": OtherName((None, False), "see `enable_prefix_caching`"),
    "output_kind": OtherName((), "calls return whole outputs"),
    "requires_token_ids": OtherName((False,), NOT_HERE),
    "step_tag_id": OtherName((None,), NOT_HERE),
    "returned_token_ids": OtherName((None,), NOT_HERE),
    "extra_kwargs": OtherName((None, {}), NOT_HERE),
}
