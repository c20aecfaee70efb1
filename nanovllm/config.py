"""Config: the user's options, validated, and never changed afterwards.

It knows nothing about models or devices: the engine settles the values that depend on the
checkpoint or the machine (the model's length, the pool's size).
"""

import functools
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanovllm.utils import names_beside
from nanovllm.utils.option import (
    DIRECTORY,
    NOTHING,
    PATH,
    QUANTIZATION,
    REVISION,
    TRUE_OR_FALSE,
    Rule,
    by_name,
    check_options,
    float_range,
    int_range,
    one_of,
    option,
    required,
    type_of,
)

if TYPE_CHECKING:
    from nanovllm.speculative_config import SpeculativeConfig
else:  # the class is loaded when the option is given, as a dict of this type
    SpeculativeConfig = Mapping[str, Any]
    __getattr__ = names_beside("config")

DTYPES = ("auto", "float32", "float16", "bfloat16")
# The defaults of `max_num_batched_tokens` and `max_num_seqs`. On a CPU, larger steps take so long
# that others wait, and give no more tokens a second.
BATCHED_TOKENS = {"cuda": 16384, "cpu": 1024}
NUM_SEQS = {"cuda": 512, "cpu": 256}
MAX_RANKS = 8
MAX_POSITIONS = 1 << 24  # positions are computed in float32, which has all integers up to this
MAX_LORAS, MAX_LORA_RANK = 1024, 512
MAX_WAITING = 1024  # samples, in addition to those that run; for AsyncLLM and the server
TOOL_PARSERS = (
    "hermes", "llama3_json", "mistral", "mistral_args", "pythonic", "qwen3_coder",
    "harmony", "none")  # fmt: skip
REASONING_PARSERS = ("qwen3", "deepseek_r1", "harmony", "none")
ModelName = str | os.PathLike[str] | None  # None is an error, which names the caller's class
DEVICES = "'auto', 'cpu', 'cuda' or 'cuda:N'"


def _check_device(name: str, value: Any) -> str:
    """Return a device's name; accept torch.device objects, too."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(value)):
        raise ValueError(f"{name} must be {DEVICES}, got {str(value)!r}")
    return str(value)


def _other_names() -> Any:
    """vLLM's names, and the names of SamplingParams, which callers may give by mistake."""
    from nanovllm.from_vllm.names.not_options import not_options

    return not_options()


def _checked_in(module: str, allowed: str, pairs: bool = False) -> Rule:
    """A rule whose check is `check_option` of a module, which is loaded for the first value."""
    load = functools.partial(import_module, f"nanovllm.{module}")
    return Rule(lambda *given: load().check_option(*given, allowed), allowed, pairs=pairs)


LORA_MODULES = _checked_in("lora_request", "a list of texts like NAME=PATH", pairs=True)
DEVICE = Rule(_check_device, DEVICES)
DTYPE = type_of(DTYPES, {"half": "float16", "float": "float32"})  # PyTorch's other names
KV_DTYPE = type_of(("auto", "fp8"), {"fp8_e4m3": "fp8"})  # and vLLM's
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'
SPECULATION = _checked_in("speculative_config", f"a dict such as {NGRAM}")


@by_name("option", _other_names)
@dataclass(frozen=True)
class Config:
    """Options of an engine; docs/options.md lists them."""

    model: str = required(
        "a directory with `config.json` and safetensors files, or a hub id, which is downloaded",
        PATH,
    )
    _: KW_ONLY
    tokenizer: str | None = option(
        None, "another directory or hub id to load the tokenizer from", PATH, none="the model's"
    )
    revision: str | None = option(
        None, "which revision of a hub model to use", REVISION, none="the main branch"
    )
    download_dir: str | None = option(
        None, "directory for downloads from the hub", PATH, none="the cache of Hugging Face"
    )
    device: str = option(
        "auto", "`auto` is CUDA if there is a GPU; `cuda:N` is the GPU with that number", DEVICE
    )
    dtype: str = option(
        "auto",
        "type of the weights and of computation; `auto` is the checkpoint's, or float32 on a CPU"
        " without instructions for it; `half` and `float` are names of float16 and float32",
        DTYPE,
    )
    quantization: str | None = option(
        None,
        "`fp8`, `int8` or `int4` quantizes plain weights while they are loaded, `dequantize` makes"
        " plain weights of a GGUF file's; the methods of quantized checkpoints are only checked",
        QUANTIZATION,
        none="as the checkpoint is",
    )
    load_format: str = option(
        "auto",
        "`dummy`: random weights, for which only `config.json` is needed; with `safetensors` a GGUF"
        " file is an error",
        one_of("auto", "dummy", "safetensors"),
    )
    max_num_batched_tokens: int | None = option(
        None,
        "most tokens in one step; longer prompts are computed in chunks",
        int_range(1),
        none="16384 on a GPU, 1024 on a CPU",
    )
    max_num_seqs: int | None = option(
        None,
        "most sequences that run at once; each of a request's `n` samples is one",
        int_range(1),
        none="512 on a GPU, 256 on a CPU, fewer if states of sequences would take too much",
    )
    max_model_len: int | None = option(
        None,
        "most tokens of a prompt and its output together",
        int_range(2),
        none="the model's own limit, or what the KV pool can hold of one sequence if that is less",
    )
    gpu_memory_utilization: float = option(
        0.9, "share of the GPU's memory to use, everything counted", float_range(0.01, 1.0)
    )
    cpu_kvcache_gib: float = option(
        4.0,
        "size of the KV pool on a CPU in GiB, all ranks together; memory is only touched when it is"
        " used",
        float_range(0.0),
    )
    tensor_parallel_size: int = option(
        1,
        "GPUs, from `device` on, or processes on a CPU, that share the model",
        int_range(1, MAX_RANKS),
    )
    enable_expert_parallel: bool = option(
        False,
        "each rank holds some experts as a whole, instead of a part of every expert; an error if"
        " the model has no experts",
        TRUE_OR_FALSE,
    )
    enforce_eager: bool = option(False, "do not use CUDA graphs", TRUE_OR_FALSE)
    batch_invariant: bool = option(
        False, "answers never depend on other requests: docs/exactness.md", TRUE_OR_FALSE
    )
    kvcache_block_size: int | None = option(
        None,
        "tokens in a KV block",
        int_range(1),
        none="the backend's: 16 for cpu and torch, 64 for triton, 256 for flash_attn",
    )
    num_kvcache_blocks: int | None = option(
        None,
        "size of the KV pool in blocks, for each group of layers where windows or heads differ;"
        " replaces `gpu_memory_utilization` and `cpu_kvcache_gib`; in a model without attention,"
        " the room for checkpoints in tokens by `kvcache_block_size`",
        int_range(1),
        none="as many as these allow",
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of the KV cache; `auto` is `dtype`; `fp8` is e4m3 with a scale for each token and"
        " head, half of a 16-bit type's memory; `fp8_e4m3` is another name of it",
        KV_DTYPE,
    )
    attention_backend: str = option(
        "auto",
        "what computes attention; `auto` is the fastest backend that works on the device",
        one_of("auto", "flash_attn", "triton", "cpu", "torch"),
    )
    enable_prefix_caching: bool = option(
        True, "reuse the KV of prompts that begin with the same tokens", TRUE_OR_FALSE
    )
    scheduling: str | None = option(
        None,
        "`fair`: a token for each running sequence in each step, and few tokens of prompts;"
        " `mixed`: prompts get all that is left; `prefill-first`: prompts first, for throughput",
        one_of("prefill-first", "fair", "mixed"),
        none="`fair` with `AsyncLLM` and the server, else `prefill-first`",
    )
    long_prefill_token_threshold: int = option(
        0, "most tokens of one prompt in a step, which others then share; 0: no bound", int_range(0)
    )
    scheduling_policy: str = option(
        "priority",
        "`fcfs`: requests run in order of arrival, and a `priority` other than 0 is an error",
        one_of("priority", "fcfs"),
    )
    overlap: bool | None = option(
        None,
        "start a step before the tokens of the previous step are known, so that host and device"
        " work at the same time",
        TRUE_OR_FALSE,
        none="yes on a GPU, no on a CPU",
    )
    enable_sleep_mode: bool = option(
        False,
        "let `sleep` free the memory of weights and KV pool, which are then mapped on their own",
        TRUE_OR_FALSE,
    )
    speculative_config: SpeculativeConfig | None = option(
        None,
        "guess tokens, and verify several in a step: docs/speculation.md has the keys",
        SPECULATION,
        none="one token a step, and on a CPU those that structured outputs force",
    )
    enable_lora: bool = option(
        False, "requests may use LoRA adapters, as `lora_request`: docs/adapters.md", TRUE_OR_FALSE
    )
    max_loras: int = option(
        8,
        "most adapters that running requests use at once; each has a slot in the device's memory",
        int_range(1, MAX_LORAS),
    )
    max_lora_rank: int = option(
        64, "largest rank of an adapter, which a slot has room for", int_range(1, MAX_LORA_RANK)
    )
    max_cpu_loras: int | None = option(
        None,
        "most adapters that are kept in the host's memory, at least `max_loras`",
        int_range(1),
        none="four times `max_loras`",
    )
    lora_modules: Iterable[str] | None = option(
        None,
        "an adapter as NAME=PATH, which requests of the server and of batch jobs use if NAME is"
        " their `model`",
        LORA_MODULES,
        none=NOTHING,
    )
    tool_parser: str | None = option(
        None,
        "how the model writes tool calls in chats: docs/tools.md; `none`: they are not read",
        one_of(*TOOL_PARSERS, "openai"),
        none="as the chat template shows",
    )
    reasoning_parser: str | None = option(
        None,
        "how the model writes reasoning in chats: `qwen3` with `<think>` and `</think>`,"
        " `deepseek_r1` with `</think>` alone, `harmony` in a channel; `none`: it is content",
        one_of(*REASONING_PARSERS, "openai_gptoss"),
        none="as the chat template shows",
    )
    logprobs_mode: str = option(
        "raw_logprobs",
        "what `logprobs` report: log-probabilities or logits, `raw` or after all parameters of the"
        " request; of prompts always the raw ones",
        one_of("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    profiler_dir: str | None = option(
        None,
        "directory for the traces of `start_profile` and `stop_profile`, which is made if there is"
        " none",
        DIRECTORY,
        none="these calls are errors",
    )
    seed: int = option(
        0,
        "decides the samples of requests without a seed of their own, and `dummy` weights",
        int_range(0, 2**63 - 1),
        none="a random one",
        value_of_none=lambda: secrets.randbits(63),
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_cpu_loras is not None or self.lora_modules or self.batch_invariant:
            import_module("nanovllm.option_pairs").check_together(self)


def asked_by(engine: object, model: ModelName, options: Mapping[str, Any]) -> Config:
    """The options of an engine; without a model, the error says how to make one of its class."""
    if model is None:
        name = type(engine).__name__
        raise TypeError(f"{name} needs a model: a path or a hub id: {name}('Qwen/Qwen3-0.6B')")
    return Config(model=model, **options)  # type: ignore[arg-type]
