"""Config: bad values are refused by name, nothing is clamped, nothing changes later."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.config import Config
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.option_pairs import log_unused

INT_FROM_1 = [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("8", TypeError),
              (True, TypeError)]  # fmt: skip
FLOATS = [(math.nan, ValueError), (math.inf, ValueError), (10**400, ValueError),
          ("0.5", TypeError), (True, TypeError), (None, TypeError)]  # fmt: skip
BOOLS = [(1, TypeError), ("no", TypeError), (None, TypeError)]

# For each field: the allowed values as its error gives them, and bad values with their error types.
BAD: dict[str, tuple[str, list[tuple[Any, type[Exception]]]]] = {
    "model": ("a path or a hub id", [(3, TypeError), (None, TypeError), ("", TypeError)]),
    "tokenizer": ("a path or a hub id", [(3, TypeError), (["x"], TypeError), ("", TypeError)]),
    "device": (
        "'auto', 'cpu', 'cuda' or 'cuda:N'",
        [("gpu", ValueError), ("cuda:", ValueError), ("cuda:-1", ValueError), (0, ValueError)],
    ),
    "dtype": (
        "'auto', 'float32', 'float16', 'bfloat16'",
        [("float8", ValueError), ("int8", ValueError), (16, ValueError), (None, ValueError)],
    ),
    "quantization": ("one of 'fp8', 'int8', 'int4'", [("fp6", ValueError), (8, ValueError)]),
    "load_format": ("'auto', 'dummy', 'safetensors'", [("gguf", ValueError), (None, ValueError)]),
    "kv_cache_dtype": (
        "'auto', 'fp8'",
        [
            ("fp8_e5m2", ValueError),
            ("int8", ValueError),
            ("bfloat16", ValueError),
            (None, ValueError),
        ],
    ),
    "logprobs_mode": (
        "'raw_logprobs', 'processed_logprobs', 'raw_logits', 'processed_logits'",
        [("logits", ValueError), (None, ValueError)],
    ),
    "attention_backend": (
        "'auto', 'flash_attn', 'triton', 'cpu', 'torch'",
        [("flash", ValueError), (None, ValueError)],
    ),
    "revision": ("a branch, a tag or a commit", [(3, TypeError), ("", TypeError)]),
    "profiler_dir": ("the path of a directory", [(3, TypeError), (["x"], TypeError)]),
    "download_dir": ("a path or a hub id", [(3, TypeError), (["x"], TypeError), ("", TypeError)]),
    "max_num_batched_tokens": (">= 1", INT_FROM_1),
    "max_num_seqs": (">= 1", INT_FROM_1),
    "max_model_len": (">= 2", [(1, ValueError), (0, ValueError), (2.0, TypeError)]),
    "gpu_memory_utilization": (
        "in [0.01, 1.0]",
        [(0, ValueError), (0.001, ValueError), (1.01, ValueError), *FLOATS],
    ),
    "cpu_kvcache_gib": (">= 0.0", [(-0.1, ValueError), *FLOATS]),
    "tensor_parallel_size": ("in [1, 8]", [*INT_FROM_1, (9, ValueError), (None, TypeError)]),
    "enable_expert_parallel": ("True or False", BOOLS),
    "enforce_eager": ("True or False", BOOLS),
    "batch_invariant": ("True or False", BOOLS),
    "kvcache_block_size": (">= 1", INT_FROM_1),
    "num_kvcache_blocks": (">= 1", INT_FROM_1),
    "enable_prefix_caching": ("True or False", BOOLS),
    "enable_sleep_mode": ("True or False", BOOLS),
    "overlap": ("True or False", BOOLS[:2]),
    "speculative_config": (
        'a dict such as {"method": "ngram", "num_speculative_tokens": 4}',
        [("ngram", TypeError), (["ngram"], TypeError), (4, TypeError)],
    ),
    "scheduling": ("'prefill-first', 'fair', 'mixed'", [("fcfs", ValueError), (1, ValueError)]),
    "long_prefill_token_threshold": (
        ">= 0",
        [
            (-1, ValueError),
            (1.5, TypeError),
            ("8", TypeError),
            (True, TypeError),
            (None, TypeError),
        ],
    ),
    "tool_parser": ("one of 'hermes', ", [("qwen", ValueError), (1, ValueError)]),
    "scheduling_policy": ("'priority', 'fcfs'", [("lifo", ValueError), (None, ValueError)]),
    "reasoning_parser": ("one of 'qwen3', ", [("think", ValueError), (True, ValueError)]),
    "seed": (
        f"in [0, {2**63 - 1}]",
        [(-1, ValueError), (2**63, ValueError), (0.5, TypeError), (True, TypeError)],
    ),
    "enable_lora": ("True or False", [(1, TypeError), ("yes", TypeError)]),
    "max_loras": ("in [1, 1024]", [(0, ValueError), (1.5, TypeError), (True, TypeError)]),
    "max_lora_rank": ("in [1, 512]", [(0, ValueError), ("8", TypeError)]),
    "max_cpu_loras": (">= 1", [(0, ValueError), ("8", TypeError)]),
    "lora_modules": ("a list of texts", [("a=b", TypeError), (3, TypeError)]),
}
CASES = [
    pytest.param(name, allowed, value, error, id=f"{name}={value!r:.12}")
    for name, (allowed, bad) in BAD.items()
    for value, error in bad
]


def config(**options: Any) -> Config:
    return Config(**{"model": "some/model", **options})


def test_every_field_has_bad_values() -> None:
    """A new option needs a check of its values."""
    assert set(BAD) == {field.name for field in dataclasses.fields(Config)}


@pytest.mark.parametrize(("name", "allowed", "value", "error"), CASES)
def test_bad_value_is_refused(name: str, allowed: str, value: Any, error: type[Exception]) -> None:
    """Bad values are not clamped or ignored; the error has the name, the range and the value."""
    with pytest.raises(error) as caught:
        config(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} must be ")
    assert allowed in message
    assert str(value)[:15] in message


@pytest.mark.parametrize("field", dataclasses.fields(Config), ids=lambda field: field.name)
def test_fields_cannot_be_set(field: "dataclasses.Field[Any]") -> None:
    """No module can change the configuration that another one uses."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config(), field.name, getattr(config(), field.name))


@pytest.mark.parametrize(
    ("option", "nearest"),
    [
        ("max_seqs", "max_num_seqs"),
        ("tensor_paralel_size", "tensor_parallel_size"),
        ("kv_block_size", "kvcache_block_size"),
        ("max_len", "max_model_len"),
        ("backend", "attention_backend"),
        ("enable_chunked_prefil", "enable_chunked_prefill"),
    ],
)
def test_unknown_option_names_the_nearest(option: str, nearest: str) -> None:
    """A misspelt option is not silently replaced by the default."""
    with pytest.raises(TypeError) as caught:
        config(**{option: 1})
    assert str(caught.value) == f"unknown option {option!r}; did you mean {nearest!r}?"


def test_unknown_option_close_to_none_lists_all() -> None:
    """Without a close name there is no suggestion, but the same error."""
    with pytest.raises(TypeError, match="unknown option 'ξ'; there are model, tokenizer, "):
        config(ξ=1)


def test_a_sampling_parameter_is_not_an_option() -> None:
    with pytest.raises(ValueError, match=r"temperature=0\.5: it is a field of SamplingParams"):
        config(temperature=0.5)


def test_none_stands_for_the_default_or_a_random_seed() -> None:
    """As in vLLM. The seed is settled at once: all ranks and `llm.config` have the same."""
    assert config(max_num_batched_tokens=None).max_num_batched_tokens is None
    seeds = {config(seed=None).seed for _ in range(3)}
    assert len(seeds) == 3, "two of them are equal once in 3e18 runs"
    assert {type(seed) for seed in seeds} == {int}


def test_numpy_ints_become_ints() -> None:
    """An np.int8 that is kept would overflow when it is multiplied with a block size."""
    fields = ["max_num_batched_tokens", "max_num_seqs", "max_model_len", "kvcache_block_size",
              "num_kvcache_blocks", "seed", "tensor_parallel_size"]  # fmt: skip
    given = {name: np.int8(1 if name == "tensor_parallel_size" else 100) for name in fields}
    value = config(**given)
    assert {name: getattr(value, name) for name in fields} == given
    assert [name for name in fields if type(getattr(value, name)) is not int] == []


def test_numpy_floats_become_floats() -> None:
    assert config(gpu_memory_utilization=np.float32(0.5)).gpu_memory_utilization == 0.5
    assert config(cpu_kvcache_gib=2).cpu_kvcache_gib == 2.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpu_memory_utilization", 1.0), ("gpu_memory_utilization", 0.01), ("max_model_len", 2),
        ("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("kvcache_block_size", 1),
        ("num_kvcache_blocks", 1), ("seed", 0), ("seed", 2**63 - 1),
    ],
)  # fmt: skip
def test_ends_of_the_ranges_are_allowed(name: str, value: Any) -> None:
    assert getattr(config(**{name: value}), name) == value


def test_paths_become_texts() -> None:
    """With a pathlib.Path that is kept, `model + "/config.json"` would fail later."""
    value = Config(model=Path("/models/q"), tokenizer=Path("/models/t"))  # type: ignore[arg-type]
    assert (value.model, value.tokenizer) == ("/models/q", "/models/t")
    assert config().tokenizer is None


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (torch.device("cpu"), "cpu"),
        (torch.device("cuda", 1), "cuda:1"),
        ("cuda:0", "cuda:0"),
        ("auto", "auto"),
    ],
)
def test_torch_devices_become_texts(given: Any, kept: str) -> None:
    """`torch.device("cuda", 1)` keeps its index."""
    assert config(device=given).device == kept


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_torch_dtypes_become_texts(name: str) -> None:
    """`torch.bfloat16` prints as "torch.bfloat16"."""
    assert config(dtype=getattr(torch, name)).dtype == name
    assert config(dtype=name).dtype == name


@pytest.mark.parametrize(("given", "kept"), [("half", "float16"), ("float", "float32")])
def test_other_names_of_types_are_known(given: str, kept: str) -> None:
    assert config(dtype=given).dtype == kept


def test_max_num_running_is_limited_by_tokens_and_blocks() -> None:
    """A decode step needs a token of its budget and a block for each sequence."""

    def max_num_running(num_blocks: int, **options: Any) -> int:
        options = dict(max_num_batched_tokens=64, max_num_seqs=512) | options
        asked = config(kvcache_block_size=16, overlap=False, **options)
        return EngineConfig.settle(asked, num_blocks, max_model_len=64).max_num_running

    assert max_num_running(100, max_num_seqs=8, max_num_batched_tokens=3) == 3
    assert max_num_running(100, max_num_seqs=3, max_num_batched_tokens=8) == 3
    assert max_num_running(5, max_num_seqs=8) == 5


def test_defaults_are_the_documented_ones() -> None:
    expected = {
        "model": "some/model", "tokenizer": None, "revision": None, "download_dir": None,
        "device": "auto", "dtype": "auto",
        "quantization": None,
        "load_format": "auto", "max_num_batched_tokens": None, "max_num_seqs": None,
        "max_model_len": None, "gpu_memory_utilization": 0.9, "cpu_kvcache_gib": 4.0,
        "tensor_parallel_size": 1, "enable_expert_parallel": False, "enforce_eager": False,
        "batch_invariant": False,
        "kvcache_block_size": None, "num_kvcache_blocks": None, "kv_cache_dtype": "auto",
        "attention_backend": "auto", "logprobs_mode": "raw_logprobs",
        "enable_prefix_caching": True, "scheduling": None, "overlap": None,
        "long_prefill_token_threshold": 0,
        "enable_sleep_mode": False, "speculative_config": None,
        "tool_parser": None, "reasoning_parser": None, "profiler_dir": None, "seed": 0,
        "scheduling_policy": "priority",
        "enable_lora": False, "max_loras": 8, "max_lora_rank": 64, "max_cpu_loras": None,
        "lora_modules": None,
    }  # fmt: skip
    assert dataclasses.asdict(config()) == expected


def test_a_copy_with_a_settled_field_is_checked_again() -> None:
    """The engine replaces `None`s in a copy: that must neither fail nor skip the checks."""
    settled = dataclasses.replace(config(), num_kvcache_blocks=7, kvcache_block_size=16)
    assert (settled.num_kvcache_blocks, settled.kvcache_block_size) == (7, 16)
    with pytest.raises(ValueError, match="num_kvcache_blocks"):
        dataclasses.replace(config(), num_kvcache_blocks=0)


@pytest.mark.parametrize(("given", "kept"), [("fp8_e4m3", "fp8"), ("fp8", "fp8"), ("auto", "auto")])
def test_vllms_name_of_an_fp8_cache_is_known(given: str, kept: str) -> None:
    assert config(kv_cache_dtype=given).kv_cache_dtype == kept


@pytest.mark.parametrize(("given", "kept"), [("awq_marlin", "awq"), ("gptq_marlin", "gptq")])
def test_vllms_names_of_methods_are_known(given: str, kept: str) -> None:
    """They name a kernel too; which one computes is our choice."""
    assert config(quantization=given).quantization == kept


def test_a_value_in_capitals_has_a_hint() -> None:
    with pytest.raises(ValueError, match=r"got 'FP8'; did you mean 'fp8'\?"):
        config(quantization="FP8")


@pytest.mark.parametrize("value", [False, True])
def test_scales_of_the_kv_cache_are_always_calculated(value: bool) -> None:
    """vLLM's option, with both of its values."""
    assert config(calculate_kv_scales=value) == config()


def test_the_host_keeps_the_adapters_that_run() -> None:
    with pytest.raises(ValueError, match="max_cpu_loras must be at least max_loras=8, got 7"):
        Config("m", max_cpu_loras=7)


@pytest.mark.parametrize("backend", ["torch", "flash_attn"])
def test_kernels_without_an_order_of_sums_exclude_batch_invariance(backend: str) -> None:
    with pytest.raises(ValueError, match=f"^batch_invariant=True needs .* is '{backend}'$"):
        Config("m", batch_invariant=True, attention_backend=backend)
    assert Config("m", batch_invariant=True, attention_backend="cpu").batch_invariant


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_options_for_another_device_are_a_warning(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, other = "cpu_kvcache_gib", "gpu_memory_utilization"
    if device != "cpu":
        ours, other = other, ours
    log_unused({ours: 0.5, "seed": 1}, device)
    assert caplog.messages == []
    log_unused({other: 0.5}, device)
    (message,) = caplog.messages
    assert message.startswith(f"{other} has no effect on a ") and message.endswith(
        f"{ours} is used"
    )
