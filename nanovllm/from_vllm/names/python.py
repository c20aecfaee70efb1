"""vLLM's names in Python code that have no counterpart here: what to use instead."""

from collections.abc import Mapping
from typing import Any

from nanovllm.utils.checks import did_you_mean

OPTIONS = "options are keywords of LLM: docs/options.md"
EXPORTS = {  # of the package, and of its modules `sampling_params`, `outputs`, `config` and `utils`
    "ModelRegistry": "use nanovllm.register_model(name, family): docs/adding_a_model.md",
    "initialize_ray_cluster": "nanovllm.ray runs engines on several machines: docs/serving.md",
    "ClassificationOutput": "no model classifies; LLM.score has scores of pairs",
    "ClassificationRequestOutput": "no model classifies; LLM.score has scores of pairs",
    "RewardRequestOutput": "no model rewards; LLM.encode has hidden states",
    "GuidedDecodingParams": "use StructuredOutputs: docs/structured.md",
    "FlexibleArgumentParser": "use argparse.ArgumentParser",
    "random_uuid": "use uuid.uuid4().hex",
    "PoolerConfig": "pooling, normalize and dimensions are options of LLM.embed",
    "ExplicitEncoderDecoderPrompt": "models are decoders; use TextPrompt or TokensPrompt",
    "EmbedsPrompt": "prompts are texts or token ids; use TextPrompt or TokensPrompt",
    "PromptAdapterRequest": "use LoRARequest: docs/adapters.md",
    "VllmConfig": "see llm.config and llm.model_config; nanovllm.config has Config",
    **dict.fromkeys(
        ("AttentionConfig", "CacheConfig", "CompilationConfig", "CUDAGraphMode", "DeviceConfig",
         "EPLBConfig", "KernelConfig", "KVEventsConfig", "KVTransferConfig", "LoadConfig",
         "LoRAConfig", "ModelConfig", "MultiModalConfig", "ObservabilityConfig", "ParallelConfig",
         "ProfilerConfig", "SchedulerConfig", "StructuredOutputsConfig"), OPTIONS,
    ),
}  # fmt: skip
ADAPTERS = "requests name their adapters, as lora_request"
OF_LLM = {  # its methods and attributes, and those of `LLMEngine`
    "classify": "no model classifies; see LLM.score and LLM.encode",
    "reward": "no model rewards; LLM.encode has hidden states",
    "set_tokenizer": "assign to llm.tokenizer",
    "get_world_size": "it is llm.config.tensor_parallel_size",
    "preprocess_chat": "LLM.chat_prompts makes token ids of conversations",
    "wait_for_completion": "LLM.step returns the outputs of finished requests",
    "reset_mm_cache": "models are text only",
    "init_weight_transfer_engine": "LLM.update_weights takes tensors",
    "has_unfinished_requests": "see LLM.is_finished; llm.llm_engine has vLLM's methods",
    **dict.fromkeys(("add_lora", "remove_lora", "pin_lora", "list_loras"), ADAPTERS),
    "model_executor": "LLM.apply_model calls a function with each rank's model",
    "vllm_config": "see llm.config and llm.model_config",
    "request_counter": "an engine numbers its requests",
    "engine_class": "llm.llm_engine has vLLM's methods",
    "default_sampling_params": "see LLM.get_default_sampling_params",
}
OF_ASYNC = {  # methods of `AsyncLLMEngine`
    **dict.fromkeys(("add_lora", "remove_lora", "pin_lora", "list_loras"), ADAPTERS),
    "shutdown_background_loop": "use shutdown",
    "start_background_loop": "an engine starts when it is made",
    "add_request": "use generate, which queues the request at the first output",
    "do_log_stats": "see get_metrics and stats",
    "get_vllm_config": "see config and model_config",
    "reset_mm_cache": "models are text only",
    "is_stopped": "see is_running and errored",
    "dead_error": "check_health raises why the engine has ended",
}
OF_WORKERS = {  # methods that `collective_rpc` calls by name
    "load_weights": "LLM.update_weights takes tensors",
    "update_weights": "LLM.update_weights takes tensors",
    "reload_weights": "use LLM.reload_weights",
    "sleep": "use LLM.sleep",
    "wake_up": "use LLM.wake_up",
    "start_profile": "use LLM.start_profile",
    "stop_profile": "use LLM.stop_profile",
    "add_lora": ADAPTERS,
    "init_weight_update_group": "LLM.update_weights takes tensors",
}
OUTPUTS = {
    "lora_request": "outputs come in the order of the prompts, and so do their adapters",
    "encoder_prompt": "models are decoders",
    "encoder_prompt_token_ids": "models are decoders",
    "multi_modal_placeholders": "models are text only",
    "kv_transfer_params": "KV blocks stay on the device",
    "routed_experts": "not supported",
}
EVENTS = {
    "outputs": (
        "an event has the new part of one sample, as `text` and `token_ids`; for vLLM's outputs"
        " pass SamplingParams(output_kind=...) or use AsyncLLMEngine"
    ),
}
METRICS = {
    **dict.fromkeys(
        ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time",
         "finished_time", "scheduled_ts", "queued_ts", "first_token_ts", "last_token_ts"),
        "times are durations in seconds: queue_time, prefill_time, decode_time,"
        " time_to_first_token, end_to_end_time",
    ),
    "time_in_queue": "it is queue_time",
    "first_token_latency": "it is time_to_first_token",
}  # fmt: skip
OF_RECORDS = {
    "RequestOutput": OUTPUTS,
    "PartialOutput": OUTPUTS,
    "StreamEvent": EVENTS,
    "RequestMetrics": METRICS,
}


def missing_field(record: Mapping[str, Any], name: str) -> AttributeError:
    """The error for a field that an output does not have."""
    kind = type(record).__name__
    answer = OF_RECORDS.get(kind, {}).get(name)
    hint = did_you_mean(name, record) if answer is None else f": {answer}"
    return AttributeError(f"{kind} has no field {name!r}{hint}")
