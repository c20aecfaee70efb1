"""vLLM's options of engines that are not fields of `Config`, from its `EngineArgs` of all versions.

`options` explains the tables. Groups of options that concern one thing share their explanation.
"""

from collections.abc import Mapping
from typing import Any

from nanovllm.from_vllm.names.accepted import SIZE
from nanovllm.utils.other_names import OtherName

Values = tuple[Any, ...]
OFF: Values = (False,)
UNSET: Values = (None,)
EMPTY: Values = (None, {})
EITHER: Values = (False, True)


def together(why: str, accepted: Mapping[str, Values]) -> dict[str, OtherName]:
    """Options with one explanation, each with the values that it accepts."""
    return {name: OtherName(values, why) for name, values in accepted.items()}


def each(accepts: Values, reasons: Mapping[str, str]) -> dict[str, OtherName]:
    """Options that accept the same values, each with its explanation."""
    return {name: OtherName(accepts, why) for name, why in reasons.items()}


SPECULATION = {
    **each(
        UNSET,
        {
            "speculative_model": '`speculative_config={"model": ...}`',
            "spec_model": '`speculative_config={"model": ...}`',
            "spec_method": '`speculative_config={"method": ...}`',
            "num_speculative_tokens": '`speculative_config={"num_speculative_tokens": ...}`',
            "spec_tokens": '`speculative_config={"num_speculative_tokens": ...}`',
            "speculative_model_quantization": '`speculative_config={"quantization": ...}`',
            "speculative_max_model_len": '`speculative_config={"max_model_len": ...}`',
            "ngram_prompt_lookup_max": (
                '`speculative_config={"method": "ngram", "prompt_lookup_max": ...}`'
            ),
            "ngram_prompt_lookup_min": (
                '`speculative_config={"method": "ngram", "prompt_lookup_min": ...}`'
            ),
            "speculative_draft_tensor_parallel_size": (
                "all ranks share the draft model; see `speculative_config`"
            ),
            "speculative_disable_by_batch_size": (
                "drafts are made where they pay; see `speculative_config`"
            ),
            "speculative_disable_mqa_scorer": "one step verifies all; see `speculative_config`",
            "disable_logprobs_during_spec_decoding": (
                "log-probabilities are reported where a request asks for them"
            ),
            "typical_acceptance_sampler_posterior_threshold": (
                "acceptance is exact; see `speculative_config`"
            ),
            "typical_acceptance_sampler_posterior_alpha": (
                "acceptance is exact; see `speculative_config`"
            ),
        },
    ),
    "spec_decoding_acceptance_method": OtherName(
        (None, "rejection_sampler"), "acceptance is exact; see `speculative_config`"
    ),
}

PLACES = {  # of processes, devices and memory
    **together(
        "ranks are processes of one machine; nanovllm.ray runs engines on several",
        {
            "distributed_executor_backend": (None, "mp", "uni"),
            "worker_use_ray": OFF,
            "engine_use_ray": OFF,
            "ray_workers_use_nsight": OFF,
            "master_addr": (None, "127.0.0.1"),
            "master_port": (None, 29501),
            "nnodes": (1,),
            "node_rank": (0,),
            "distributed_timeout_seconds": UNSET,
        },
    ),
    **together(
        "see `tensor_parallel_size`",
        {
            "pipeline_parallel_size": (1,),
            "prefill_context_parallel_size": (1,),
            "decode_context_parallel_size": (1,),
            "dcp_comm_backend": UNSET,
            "dcp_kv_cache_interleave_size": (1,),
            "cp_kv_cache_interleave_size": (1,),
            "enable_batch_sharded_sampling": (None, False),
        },
    ),
    **together(
        "nanovllm.ray runs several engines",
        {
            "data_parallel_size": (1,),
            "data_parallel_rank": UNSET,
            "data_parallel_start_rank": UNSET,
            "data_parallel_size_local": UNSET,
            "data_parallel_address": UNSET,
            "data_parallel_rpc_port": UNSET,
            "data_parallel_hybrid_lb": OFF,
            "data_parallel_external_lb": OFF,
            "data_parallel_backend": (None, "mp"),
            "dp_sync_interval": UNSET,
            "disable_nccl_for_dp_synchronization": UNSET,
            "prefill_schedule_interval": (1,),
        },
    ),
    **together(
        "see `enable_expert_parallel`; experts stay on their ranks",
        {
            "all2all_backend": (None, "allgather_reducescatter"),
            "enable_elastic_ep": OFF,
            "enable_eplb": OFF,
            "eplb_config": EMPTY,
            "expert_placement_strategy": ("linear",),
            "num_redundant_experts": (0,),
            "eplb_window_size": (None, 1000),
            "eplb_step_interval": (None, 3000),
            "eplb_log_balancedness": OFF,
            "enable_ep_weight_filter": (True,),
        },
    ),
    **together(
        "a step is computed as one",
        {
            "enable_dbo": OFF,
            "ubatch_size": (0,),
            "dbo_decode_token_threshold": (None, 32),
            "dbo_prefill_token_threshold": (None, 512),
        },
    ),
    **together(
        "weights stay on the device; see `tensor_parallel_size`",
        {
            "cpu_offload_gb": (0, 0.0),
            "cpu_offload_params": (None, []),
            "offload_backend": (None, "auto"),
            "offload_group_size": (0,),
            "offload_num_in_group": (1,),
            "offload_prefetch_step": (1,),
            "offload_params": UNSET,
        },
    ),
    **together(
        "KV blocks stay on the device",
        {
            "kv_offloading_size": UNSET,
            "kv_offloading_backend": (None, "native"),
            "kv_transfer_config": UNSET,
            "kv_events_config": UNSET,
            "ec_transfer_config": UNSET,
            "ec_manager_config": UNSET,
        },
    ),
    "swap_space": OtherName((SIZE,), "nothing is swapped: a preempted sequence is computed again"),
    "disable_custom_all_reduce": OtherName(
        OFF, "with NCCL_P2P_DISABLE=1 in the environment, NCCL makes all sums"
    ),
    "worker_cls": OtherName(("auto",), "see `LLM.apply_model`"),
    "worker_extension_cls": OtherName(("",), "see `LLM.apply_model`"),
    "max_parallel_loading_workers": OtherName(UNSET, "ranks load one tensor at a time"),
    **together(
        "the failure of a rank ends the engine",
        {"enable_fault_tolerance": OFF, "fault_tolerance_config": UNSET},
    ),
    "shutdown_timeout": OtherName((0, 0.0), "see `LLM.close`"),
}

CACHES = {
    "block_size": OtherName(ours="kvcache_block_size"),
    "num_gpu_blocks_override": OtherName(ours="num_kvcache_blocks"),
    "kv_cache_memory_bytes": OtherName(
        UNSET, "see `num_kvcache_blocks` and `gpu_memory_utilization`"
    ),
    "calculate_kv_scales": OtherName(
        EITHER, "an fp8 cache has the checkpoint's scales, or one for each token and head"
    ),
    "kv_cache_dtype_skip_layers": OtherName((None, []), "see `kv_cache_dtype`"),
    "prefix_caching_hash_algo": OtherName(
        ("builtin", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
        "tokens with equal hashes are compared before they are shared",
    ),
    "prefix_cache_retention_interval": OtherName(UNSET, "see `enable_prefix_caching`"),
    "prefix_match_unit": OtherName(UNSET, "see `kvcache_block_size`"),
    "disable_sliding_window": OtherName(OFF, "windows are those of the model"),
    "disable_cascade_attn": OtherName(EITHER, "there is no cascade attention"),
    "disable_hybrid_kv_cache_manager": OtherName(
        (None, False), "layers with windows keep their windows alone"
    ),
    "kv_sharing_fast_prefill": OtherName(OFF, "layers share KV as the model says"),
    "use_v2_block_manager": OtherName(EITHER, "there is one block manager"),
    "num_lookahead_slots": OtherName((0,), "see `speculative_config`"),
    **together(
        "recurrent states are float32, and convolutions have the model's `dtype`",
        {
            "mamba_cache_dtype": ("auto",),
            "mamba_ssm_cache_dtype": ("auto", "float32"),
            "enable_mamba_cache_stochastic_rounding": OFF,
            "mamba_cache_philox_rounds": (0,),
        },
    ),
    **together(
        "recurrent layers are computed by nanovllm's kernels, and states kept at ends of blocks",
        {
            "mamba_block_size": UNSET,
            "mamba_cache_mode": UNSET,
            "mamba_backend": UNSET,
            "mamba_config": UNSET,
            "mamba_ssu_algorithm": UNSET,
            "use_replayssm": OFF,
            "replayssm_buffer_len": UNSET,
            "gdn_prefill_backend": UNSET,
            "kda_prefill_backend": UNSET,
        },
    ),
}

STEPS = {  # of the scheduler and of the device
    "async_scheduling": OtherName(ours="overlap"),
    "enable_chunked_prefill": OtherName(
        (True, None),
        "prompts that exceed `max_num_batched_tokens`, or what is left of it in a step, are always"
        " computed in chunks, and running requests go on meanwhile; see `scheduling`",
    ),
    "policy": OtherName(ours="scheduling_policy"),
    "preemption_mode": OtherName((None, "recompute"), "preempted sequences are computed again"),
    "max_num_scheduled_tokens": OtherName(UNSET, "see `max_num_batched_tokens`"),
    **together(
        "prompts are computed in order, next to each other as far as a step has tokens: see"
        " `long_prefill_token_threshold`, `max_num_batched_tokens` and `scheduling`",
        {
            "max_num_partial_prefills": (1,),
            "max_long_partial_prefills": (1,),
            "scheduler_delay_factor": (0, 0.0),
        },
    ),
    **together(
        "a request begins when its whole prompt has blocks",
        {"scheduler_reserve_full_isl": (True,), "watermark": (0, 0.0)},
    ),
    **together(
        "each step gives each sequence its tokens",
        {
            "num_scheduler_steps": (1,),
            "multi_step_stream_outputs": EITHER,
            "stream_interval": (None, 1),
            "disable_async_output_proc": EITHER,
        },
    ),
    **together(
        "see `max_waiting` of `AsyncLLM`",
        {"max_num_queued_reqs": UNSET, "max_num_queued_tokens": UNSET},
    ),
    "scheduler_cls": OtherName(UNSET, "see `scheduling`"),
    **together(
        "`enforce_eager` decides whether graphs are used",
        {
            "compilation_config": EMPTY,
            "cudagraph_capture_sizes": UNSET,
            "max_cudagraph_capture_size": UNSET,
            "optimization_level": (None, 2),
            "performance_mode": ("balanced",),
        },
    ),
    "max_seq_len_to_capture": OtherName((None, 8192), "graphs serve sequences of any length"),
    **together(
        "kernels are chosen by the device; see `attention_backend`",
        {
            "attention_config": EMPTY,
            "kernel_config": EMPTY,
            "moe_backend": ("auto",),
            "linear_backend": ("auto",),
            "enable_flashinfer_autotune": (None, False),
            "enable_bf16x3_router_gemm": (None, False),
            "ir_op_priority": UNSET,
            "use_fp64_gumbel": OFF,
        },
    ),
}
