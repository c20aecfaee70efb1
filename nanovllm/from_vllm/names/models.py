"""vLLM's options of models, inputs, outputs and logs that are not fields of `Config`.

`options` explains the tables.
"""

from nanovllm.from_vllm.names.accepted import GUIDANCE, LIMIT, NO_ITEMS, SIZE
from nanovllm.from_vllm.names.engine import EITHER, EMPTY, OFF, UNSET, together
from nanovllm.utils.other_names import OtherName

EVERY_MODEL = "every model generates and has `embed`, `encode` and `score`; none classifies"

MODELS = {
    "trust_remote_code": OtherName(EITHER, "code in a checkpoint is never run"),
    "task": OtherName(
        ("auto", "generate", "embed", "embedding", "score", "token_embed"), EVERY_MODEL
    ),
    "runner": OtherName(("auto", "generate", "pooling"), EVERY_MODEL),
    "convert": OtherName(("auto", "none", "embed"), EVERY_MODEL),
    **together(
        "`pooling`, `normalize` and `dimensions` are options of `embed`",
        {"pooler_config": UNSET, "override_pooler_config": UNSET},
    ),
    "tokenizer_mode": OtherName(("auto", "hf"), "the tokenizer is the one of transformers"),
    "tokenizer_revision": OtherName(UNSET, "`tokenizer` may be a directory"),
    "skip_tokenizer_init": OtherName(OFF, "a model without tokenizer files takes token ids"),
    "tokens_only": OtherName(OFF, "`detokenize=False` of `SamplingParams` makes no text"),
    **together(
        "prompts are tokenized when they are queued",
        {
            "tokenizer_pool_size": (0,),
            "tokenizer_pool_type": UNSET,
            "tokenizer_pool_extra_config": UNSET,
            "renderer_num_workers": (1,),
        },
    ),
    "hf_token": OtherName(UNSET, "set HF_TOKEN in the environment"),
    **together(
        "edit config.json",
        {
            "hf_overrides": EMPTY,
            "rope_scaling": EMPTY,
            "rope_theta": UNSET,
            "hf_config_path": UNSET,
            "override_attention_dtype": UNSET,
        },
    ),
    "config_format": OtherName(("auto", "hf"), "models have transformers' config.json"),
    "code_revision": OtherName(UNSET, "code in a checkpoint is never run"),
    "model_weights": OtherName((None, ""), "weights are beside config.json"),
    "model_impl": OtherName(("auto",), "models are nanovllm's; see `register_model`"),
    "model_class_overrides": OtherName(EMPTY, "see `register_model`"),
    "quantization_config": OtherName(EMPTY, "see `quantization`"),
    "quantization_param_path": OtherName(UNSET, "scales are in the checkpoint"),
    "allow_deprecated_quantization": OtherName(EITHER, "see `quantization` for all methods"),
    **together(
        "safetensors and GGUF files are read tensor by tensor; see `load_format`",
        {
            "safetensors_load_strategy": (None, "lazy"),
            "model_loader_extra_config": EMPTY,
            "ignore_patterns": (None, []),
            "pt_load_map_location": ("cpu",),
            "use_tqdm_on_load": OFF,
        },
    ),
    "qlora_adapter_name_or_path": OtherName(UNSET, "see `enable_lora`"),
    "enable_cumem_allocator": OtherName(OFF, "see `enable_sleep_mode`"),
    "enable_nccl_comm_suspend": OtherName(OFF, "see `enable_sleep_mode`"),
    "weight_transfer_config": OtherName(UNSET, "see `LLM.update_weights`"),
    "diffusion_config": OtherName(UNSET, "models generate token by token"),
    "additional_config": OtherName(EMPTY, "nothing would read it"),
    "fail_on_environ_validation": OtherName(EITHER, "vLLM's environment variables are not read"),
}

ADAPTERS = {
    "lora_dtype": OtherName(("auto", None), "adapters have the model's `dtype`"),
    "fully_sharded_loras": OtherName(EITHER, "ranks hold the parts of their layers"),
    **together(
        "adapters change the layers that their files name",
        {
            "lora_target_modules": UNSET,
            "specialize_active_lora": OFF,
            "enable_mixed_moe_lora_format": OFF,
            "enable_moe_shared_loras": OFF,
            "lora_extra_vocab_size": (0,),
            "long_lora_scaling_factors": UNSET,
            "enable_lora_bias": OFF,
        },
    ),
    **together(
        "see `enable_lora`",
        {
            "enable_prompt_adapter": OFF,
            "max_prompt_adapters": UNSET,
            "max_prompt_adapter_token": UNSET,
        },
    ),
}

INPUTS = {
    **together(
        "models are text only",
        {
            "limit_mm_per_prompt": (None, NO_ITEMS),
            "enable_mm_embeds": OFF,
            "interleave_mm_strings": OFF,
            "media_io_kwargs": EMPTY,
            "mm_processor_kwargs": EMPTY,
            "mm_processor_cache_gb": (SIZE,),
            "mm_processor_cache_type": (None, "lru", "shm"),
            "mm_hasher_algorithm": UNSET,
            "mm_shm_cache_max_object_size_mb": (None, SIZE),
            "mm_encoder_only": OFF,
            "mm_encoder_tp_mode": (None, "weights", "data"),
            "mm_encoder_attn_backend": UNSET,
            "mm_encoder_attn_dtype": UNSET,
            "mm_encoder_fp8_scale_path": UNSET,
            "mm_encoder_fp8_scale_save_path": UNSET,
            "mm_encoder_fp8_scale_save_margin": UNSET,
            "skip_mm_profiling": EITHER,
            "language_model_only": EITHER,
            "video_pruning_rate": (None, 0, 0.0),
            "video_pruning_method": UNSET,
            "mm_tensor_ipc": UNSET,
            "mm_processor_device": ("auto",),
            "mm_ipc_gpu_memory_gb": UNSET,
            "mm_device_do_normalize": UNSET,
            "allowed_local_media_path": (None, ""),
            "allowed_media_domains": UNSET,
            "default_mm_loras": UNSET,
            "enable_tower_connector_lora": OFF,
            "disable_chunked_mm_input": EITHER,
            "disable_mm_preprocessor_cache": EITHER,
            "enable_multimodal_encoder_data_parallel": OFF,
        },
    ),
    "enable_prompt_embeds": OtherName(OFF, "prompts are texts or token ids"),
    "io_processor_plugin": OtherName(UNSET, "prompts are texts or token ids"),
}

OUTPUTS = {
    "generation_config": OtherName(
        ("vllm",), "pass `llm.get_default_sampling_params()` for the model's parameters"
    ),
    "override_generation_config": OtherName(EMPTY, "pass `SamplingParams`"),
    "max_logprobs": OtherName((LIMIT,), "`logprobs` of an `LLM` has no limit"),
    "tool_call_parser": OtherName(ours="tool_parser"),
    "enable_auto_tool_choice": OtherName(
        EITHER, "calls are read where a request has tools; `tool_choice` may be `none`"
    ),
    **together(
        "see `tool_parser` and `reasoning_parser`",
        {"reasoning_parser_plugin": (None, ""), "reasoning_config": UNSET},
    ),
    "structured_outputs_config": OtherName(
        (None, GUIDANCE), "llguidance makes all constraints; see `structured_outputs`"
    ),
    "logits_processors": OtherName((None, []), "it is a field of `SamplingParams`"),
    "guided_decoding_backend": OtherName(
        (None, "auto", "guidance"), "llguidance makes all constraints"
    ),
    **together(
        "see `structured_outputs` of `SamplingParams`",
        {
            "guided_decoding_disable_fallback": (None, True),
            "guided_decoding_disable_any_whitespace": (None, False),
            "guided_decoding_disable_additional_properties": (None, False),
        },
    ),
    "logits_processor_pattern": OtherName(
        UNSET, "`logits_processors` of `SamplingParams` are callables"
    ),
    **together(
        "not supported",
        {
            "enable_return_routed_experts": OFF,
            "return_sampling_mask": OFF,
            "enable_trace_replay": OFF,
        },
    ),
    "served_model_name": OtherName(UNSET, "it is an option of `nanovllm serve`"),
}

LOGS = {
    "disable_log_stats": OtherName(
        EITHER, "nothing is logged; `get_metrics`, `stats` and `metrics` always have all"
    ),
    **together(
        "requests are not logged",
        {"disable_log_requests": (True,), "enable_log_requests": OFF, "max_log_len": UNSET},
    ),
    "aggregate_engine_logging": OtherName(EITHER, "an engine logs once for all ranks"),
    "profiler_config": OtherName(EMPTY, "see `profiler_dir`"),
    **together(
        "`profiler_dir` and `start_profile` record traces",
        {
            "otlp_traces_endpoint": UNSET,
            "collect_detailed_traces": UNSET,
            "enable_layerwise_nvtx_tracing": OFF,
            "jit_monitor_mode": UNSET,
            "jit_monitor_verbose": OFF,
        },
    ),
    **together(
        "see `get_metrics` and `stats`",
        {
            "show_hidden_metrics_for_version": UNSET,
            "kv_cache_metrics": OFF,
            "kv_cache_metrics_sample": (None, 0.01),
            "cudagraph_metrics": OFF,
            "enable_mfu_metrics": OFF,
            "enable_logging_iteration_details": OFF,
            "enable_mm_processor_stats": OFF,
            "per_request_spec_decode_metrics": (None, "none"),
        },
    ),
}
