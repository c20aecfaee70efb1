"""vLLM's names of options and of sampling and pooling parameters that are not fields here.

Some are other names of fields. The others accept only the values that ask for what nanovllm always
does; other values are errors that say what to use. docs/from_vllm.md shows these tables.
"""

from nanovllm.utils.other_names import OtherName

NOT_HERE = "not supported"

ENGINE = {
    "block_size": OtherName(ours="kvcache_block_size"),
    "num_gpu_blocks_override": OtherName(ours="num_kvcache_blocks"),
    "async_scheduling": OtherName(ours="overlap"),
    "tool_call_parser": OtherName(ours="tool_parser"),
    "enable_auto_tool_choice": OtherName(
        (True, False), "calls are read where a request has tools; `tool_choice` may be `none`"
    ),
    "trust_remote_code": OtherName((False, True), "code in a checkpoint is never run"),
    "disable_log_stats": OtherName(
        (True, False), "nothing is logged; `get_metrics`, `stats` and `metrics` always have all"
    ),
    "swap_space": OtherName((0, 0.0), "a preempted sequence is computed again, not swapped"),
    "cpu_offload_gb": OtherName((0, 0.0), "weights stay on the device; see `tensor_parallel_size`"),
    "enable_chunked_prefill": OtherName(
        (True, None), "prompts longer than `max_num_batched_tokens` are computed in chunks"
    ),
    "scheduling_policy": OtherName(
        ("fcfs", "priority"), "`priority` of a request decides, then the order of arrival"
    ),
    "preemption_mode": OtherName((None, "recompute"), "preempted sequences are computed again"),
    "kv_cache_memory_bytes": OtherName(
        (None,), "see `num_kvcache_blocks` and `gpu_memory_utilization`"
    ),
    "calculate_kv_scales": OtherName(
        (False, True), "an fp8 cache has the checkpoint's scales, or one for each token and head"
    ),
    "lora_dtype": OtherName(("auto", None), "adapters have the model's `dtype`"),
    "fully_sharded_loras": OtherName((False, True), "ranks hold the parts of their layers"),
    "structured_outputs_config": OtherName((None,), NOT_HERE),
    "limit_mm_per_prompt": OtherName((None, {}), "models are text only"),
    "compilation_config": OtherName((None, {}), "`enforce_eager` decides whether graphs are used"),
    "max_seq_len_to_capture": OtherName((None, 8192), "graphs serve sequences of any length"),
    "disable_log_requests": OtherName((False, True), "requests are not logged"),
    "disable_custom_all_reduce": OtherName(
        (False,), "with NCCL_P2P_DISABLE=1 in the environment, NCCL makes all sums"
    ),
    "distributed_executor_backend": OtherName(
        (None, "mp", "uni"),
        "ranks are processes of one machine; nanovllm.ray runs engines on several",
    ),
    "pipeline_parallel_size": OtherName((1,), "see `tensor_parallel_size`"),
    "data_parallel_size": OtherName((1,), "nanovllm.ray runs several engines"),
    "tokenizer_mode": OtherName(("auto",), "the tokenizer is the one of transformers"),
    "tokenizer_revision": OtherName((None,), "`tokenizer` may be a directory"),
    "skip_tokenizer_init": OtherName((False,), "a model without tokenizer files takes token ids"),
    "hf_token": OtherName((None,), "set HF_TOKEN in the environment"),
    "hf_overrides": OtherName((None, {}), "edit config.json"),
    "rope_scaling": OtherName((None, {}), "edit config.json"),
    "rope_theta": OtherName((None,), "edit config.json"),
    "generation_config": OtherName(
        ("vllm",), "the defaults are those of `SamplingParams`; see `get_default_sampling_params`"
    ),
    "override_generation_config": OtherName((None, {}), "pass `SamplingParams`"),
    "profiler_config": OtherName((None,), "see `profiler_dir`"),
    "max_logprobs": OtherName((-1, 20), "`logprobs` has no limit"),
    "logprobs_mode": OtherName(
        ("raw_logprobs",), "log-probabilities are those before any parameter changes them"
    ),
    "task": OtherName(("auto", "generate"), "models generate text"),
    "runner": OtherName(("auto", "generate"), "models generate text"),
}

SAMPLING = {
    "best_of": OtherName((None, 1), "all `n` samples are returned"),
    "spaces_between_special_tokens": OtherName((True,), "the tokenizer decides"),
    "guided_decoding": OtherName((None,), "see `structured_outputs`"),
    "guided_decoding_backend": OtherName((None,), "llguidance makes all constraints"),
    **{
        f"guided_{kind}": OtherName((None,), f"it is `{kind}` of `structured_outputs`")
        for kind in ("json", "regex", "choice", "grammar", "whitespace_pattern")
    },
    "guided_json_object": OtherName((None, False), "it is `json_object` of `structured_outputs`"),
    "structural_tag": OtherName((None,), "it is `structural_tag` of `structured_outputs`"),
    "output_kind": OtherName((), "`generate` returns whole outputs, `stream` new parts"),
    "logprob_token_ids": OtherName((None,), NOT_HERE),
    "flat_logprobs": OtherName((False,), "logprobs are lists of dicts"),
    "use_beam_search": OtherName((False,), "see `LLM.beam_search`"),
    "thinking_token_budget": OtherName((None,), NOT_HERE),
    "repetition_detection": OtherName((None,), NOT_HERE),
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

VECTOR_CALLS = {  # options of `embed`, `encode` and `score`
    "pooling_task": OtherName(
        (None,), "`embed` makes vectors, `encode` returns states; `pooling` chooses the tokens"
    ),
    "tokenization_kwargs": OtherName((None, {}), "see `truncate_prompt_tokens`"),
    "chat_template": OtherName((None,), "see `instruction`"),
}
