"""The groups of options in the help: for each dataclass its common options, then the others.

A field that is in no group here is in the last one, so that a new option is never missing.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from nanovllm.command.field_options import add_field_options
from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.limits import Limits
from nanovllm.server.options import ServerOptions
from nanovllm.utils.option import options_of

OTHERS = "others"
MARK = ": "  # in the titles of groups that are not the common one

# The first name of each class is the title of its common options, the rest are added to it.
GROUPS: dict[type, dict[str, tuple[str, ...]]] = {
    Config: {
        "engine": (
            "model", "device", "dtype", "quantization", "max_model_len", "max_num_seqs",
            "tensor_parallel_size", "gpu_memory_utilization", "cpu_kvcache_gib",
        ),
        "files": ("tokenizer", "revision", "download_dir", "load_format"),
        "KV cache": (
            "kv_cache_dtype", "kvcache_block_size", "num_kvcache_blocks", "enable_prefix_caching",
        ),
        "steps": (
            "max_num_batched_tokens", "scheduling", "scheduling_policy",
            "long_prefill_token_threshold", "overlap",
            "enforce_eager", "batch_invariant", "attention_backend", "speculative_config",
            "enable_expert_parallel",
        ),
        "chats": ("tool_parser", "reasoning_parser"),
        "adapters": ("enable_lora", "lora_modules", "max_loras", "max_lora_rank", "max_cpu_loras"),
    },
    SamplingParams: {
        "sampling": ("temperature", "top_p", "top_k", "max_tokens", "stop", "seed", "n"),
        "penalties and choice of tokens": (
            "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
            "allowed_token_ids", "bad_words", "structured_outputs",
        ),
        "end": ("min_tokens", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
        "output": (
            "logprobs", "prompt_logprobs", "hidden_states", "detokenize", "skip_special_tokens",
        ),
    },
    ServerOptions: {
        "server": ("host", "port", "served_model_name", "api_key"),
        "network": ("uds", "root_path", "ssl_certfile", "ssl_keyfile"),
        "access": (
            "allowed_host", "cors_origin", "trust_request_chat_template", "allow_priority",
            "allow_lora_updates", "sleep_endpoints",
        ),
        "limits": tuple(options_of(Limits)),
    },
}  # fmt: skip


def add_grouped_options(
    parser: argparse.ArgumentParser, kind: type, defaults: Mapping[str, Any]
) -> None:
    """Add an option for each field of the class, in its groups."""
    groups, fields = GROUPS[kind], options_of(kind)
    common = next(iter(groups))
    named = [name for names in groups.values() for name in names]
    others = tuple(name for name in fields if name not in named)
    for title, names in {**groups, OTHERS: others}.items():
        shown = title if title == common else f"{common}{MARK}{title}"
        if names:
            group = parser.add_argument_group(shown)
            add_field_options(group, kind, defaults, [n for n in names if n in fields])


def common_first(parser: argparse.ArgumentParser) -> None:
    """Show the groups of common options before all others."""
    parser._action_groups.sort(key=lambda group: MARK in (group.title or ""))
