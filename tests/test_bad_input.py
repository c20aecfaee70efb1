"""Bad input is refused with an error that says what is wrong, and changes nothing."""

import logging
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audits import audit_scheduler
from conftest import byte_tokenizer, make_model
from transformers import BatchEncoding

from nanovllm import LLM, SamplingParams
from nanovllm.engine.requests.prompt_length import PromptTooLongError

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_LEN = 64
OPTIONS: dict[str, Any] = dict(
    device="cpu", kvcache_block_size=4, num_kvcache_blocks=32, max_model_len=MAX_LEN
)
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONGEST_MESSAGE = 1000


def make_llm(path: Path, **options: Any) -> LLM:
    return LLM(path, **OPTIONS | options)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[LLM]]:
    """The engine that tests share; empty after a test that has changed it."""
    unchanged: list[LLM] = []
    yield unchanged
    for llm in unchanged:
        llm.close()


@pytest.fixture
def llm(engines: list[LLM], model_dir: Path) -> Iterator[LLM]:
    """An engine, and a check that refused calls have changed nothing in it."""
    llm = engines.pop() if engines else make_llm(model_dir)
    expected = llm.generate([1, 2], GREEDY, use_tqdm=False)[0]["token_ids"]
    before = state(llm)
    yield llm
    assert state(llm) == before, "something was queued or run"
    assert llm.is_finished() and llm.step() == []
    audit_scheduler(llm.scheduler)
    assert llm.generate([1, 2], GREEDY, use_tqdm=False)[0]["token_ids"] == expected
    engines.append(llm)


def state(llm: LLM) -> tuple[Any, ...]:
    """Everything in an engine that a request changes."""
    scheduler, counter = llm.scheduler, llm.counter
    queues = list(scheduler.waiting), list(scheduler.running)
    blocks = list(scheduler.block_manager.free_queue)
    return queues, blocks, counter.prefill_tokens, counter.decode_tokens


def assert_says(error: BaseException, *fragments: str) -> None:
    message = str(error)
    assert [f for f in fragments if f not in message] == [], message
    assert len(message) < LONGEST_MESSAGE, "the message is too long to read"


# Prompts: a bad one, its error, and what the message must contain

IDS_RANGE = "[0, 258]"
LENGTHS = f"1 to {MAX_LEN - 1}"
BAD_PROMPTS: list[tuple[Any, type[Exception], list[str]]] = [
    ("", ValueError, [LENGTHS, "got 0"]),
    ([], ValueError, [LENGTHS, "got 0"]),
    (np.array([], dtype=int), ValueError, [LENGTHS, "got 0"]),
    ("x" * MAX_LEN, PromptTooLongError, [LENGTHS, f"max_model_len={MAX_LEN}", f"got {MAX_LEN}"]),
    ([1] * MAX_LEN, PromptTooLongError, [LENGTHS, f"max_model_len={MAX_LEN}", f"got {MAX_LEN}"]),
    ([1] * 10**6, PromptTooLongError, [LENGTHS, "got 1000000"]),
    ([1, -1, 2], ValueError, [IDS_RANGE, "-1"]),
    ([1, 259], ValueError, [IDS_RANGE, "259"]),
    ([2**63], ValueError, [IDS_RANGE, str(2**63)]),
    (np.array([3, 300]), ValueError, [IDS_RANGE, "300"]),
    (torch.tensor([3, -300]), ValueError, [IDS_RANGE, "-300"]),
    ([1, 2.0], TypeError, [IDS_RANGE, "2.0"]),
    ([1, math.nan], TypeError, [IDS_RANGE, "nan"]),
    (np.array([1.5, 2.5]), TypeError, [IDS_RANGE, "1.5"]),
    (torch.tensor([0.5]), TypeError, [IDS_RANGE, "0.5"]),
    ([1, True], TypeError, [IDS_RANGE, "True"]),
    ([False], TypeError, [IDS_RANGE, "False"]),
    (np.array([True]), TypeError, [IDS_RANGE, "True"]),
    ([1, None], TypeError, [IDS_RANGE, "None"]),
    ([1, "2"], TypeError, [IDS_RANGE, "'2'"]),
    ([[1, 2]], TypeError, [IDS_RANGE, "[1, 2]"]),
    ([[7] * 10**5], TypeError, [IDS_RANGE]),
    (None, TypeError, ["None"]),
    (5, TypeError, ["list of token ids", "5"]),
    (True, TypeError, ["list of token ids", "True"]),
    (1.5, TypeError, ["list of token ids", "1.5"]),
    (b"text", TypeError, ["list of token ids", "b'text'"]),
    (bytearray(b"text"), TypeError, ["list of token ids", "bytearray"]),
    (memoryview(b"text"), TypeError, ["list of token ids"]),
    ({"prompts": "text"}, TypeError, ["list of token ids", "prompt_token_ids", "with 'prompts'"]),
    ({}, TypeError, ["list of token ids", "prompt_token_ids", "got a dict without them"]),
    ({"prompt": None}, TypeError, ["got a dict without them"]),
    ({"prompt": [1, 2]}, TypeError, ["'prompt' must be a str, got [1, 2]"]),
    ({"prompt": b"text"}, TypeError, ["'prompt' must be a str, got b'text'"]),
    ({"prompt": ""}, ValueError, [LENGTHS, "got 0"]),
    ({"prompt": "text", "prompt_token_ids": []}, ValueError, [LENGTHS, "got 0"]),
    ({"prompt_token_ids": [1, 259]}, ValueError, [IDS_RANGE, "259"]),
    ({"prompt_token_ids": 5}, TypeError, ["list of token ids", "5"]),
    ({"cache_salt": "a"}, TypeError, ["prompt_token_ids", "got a dict without them"]),
    ({"prompt": "a", "cache_salt": 0}, TypeError, ["'cache_salt' must be a text", "got 0"]),
    ({"prompt": "a", "cache_salt": ""}, ValueError, ["1 to 256 characters", "got 0"]),
    ({"prompt": "a", "cache_salt": "x" * 257}, ValueError, ["1 to 256 characters", "got 257"]),
    ({"prompt": "a", "cache_salt": "\ud800"}, ValueError, ["'cache_salt' is not valid Unicode"]),
    ({"prompt_token_ids": "text"}, TypeError, ["must be a list of token ids", "got 'text'"]),
    (
        {"prompt": "a", "multi_modal_data": {"a": 1}},
        ValueError,
        ["'multi_modal_data'", "text only"],
    ),
    ({str(n): n for n in range(10**5)}, TypeError, ["list of token ids"]),
    ({1, 2}, TypeError, ["list of token ids", "{1, 2}"]),
    (frozenset({1, 2}), TypeError, ["list of token ids", "frozenset"]),
    (BatchEncoding({"input_ids": [1, 2]}), TypeError, ["input_ids"]),
    (object(), TypeError, ["list of token ids", "object"]),
    (torch.tensor(3), TypeError, ["list of token ids", "3"]),
]
CASES = [
    pytest.param(*case, id=f"{type(case[0]).__name__}-{str(case[0]).partition(' at 0x')[0][:24]}")
    for case in BAD_PROMPTS
]


@pytest.mark.parametrize(("prompt", "error", "says"), CASES)
def test_a_bad_prompt_among_good_ones_is_named(
    llm: LLM, prompt: Any, error: type[Exception], says: list[str]
) -> None:
    """The error gives the prompt's index, and the good prompts before it are not queued."""
    with pytest.raises(error) as caught:
        llm.generate(["good", [1, 2], prompt, "good"], GREEDY, use_tqdm=False)
    assert type(caught.value) is error
    assert_says(caught.value, "prompts[2]", *says)


@pytest.mark.parametrize(("prompt", "error", "says"), CASES)
def test_add_request_refuses_a_bad_prompt(
    llm: LLM, prompt: Any, error: type[Exception], says: list[str]
) -> None:
    with pytest.raises(error) as caught:
        llm.add_request(prompt, GREEDY)
    assert_says(caught.value, "prompt", *says)


@pytest.mark.parametrize(
    ("prompts", "error", "says"),
    [
        ("", ValueError, [LENGTHS]),
        ([[]], ValueError, ["prompts[0]", LENGTHS]),
        ([-1], ValueError, [IDS_RANGE, "-1"]),
        ([True, False], TypeError, [IDS_RANGE, "True"]),
        (np.array([[1, 2], [3, 400]]), ValueError, ["prompts[1]", IDS_RANGE, "400"]),
        (np.array([[1.0, 2.0]]), TypeError, ["prompts[0]", IDS_RANGE, "1.0"]),
        (np.zeros((2, 2, 2), dtype=int), TypeError, ["prompts[0]", IDS_RANGE, "[0, 0]"]),
        (None, TypeError, ["prompts", "None"]),
        (7, TypeError, ["prompts", "7"]),
        (b"text", TypeError, ["prompts", "b'text'"]),
        (bytearray(b"text"), TypeError, ["prompts", "bytearray"]),
        ({"a": "text"}, TypeError, ["prompt", "got a dict with 'a'"]),
        ({"a", "b"}, TypeError, ["prompts"]),
        (frozenset(["a"]), TypeError, ["prompts"]),
        (BatchEncoding({"input_ids": [[1, 2]]}), TypeError, ["prompt", "with 'input_ids'"]),
        (torch.tensor(3), TypeError, ["prompts", "3"]),
        # Most items of the list are ids, so the error names the one that is not.
        ([1, 2.5, 3], TypeError, ["2.5"]),
        ([1, None], TypeError, ["None"]),
        ([1, 2, "3"], TypeError, ["'3'"]),
    ],
    ids=lambda value: "set" if isinstance(value, set) else str(value)[:24],
)
def test_generate_refuses_bad_prompts(
    llm: LLM, prompts: Any, error: type[Exception], says: list[str]
) -> None:
    """Mappings are not read as their keys, nor bytes as ids; the error names the bad id."""
    with pytest.raises(error) as caught:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert_says(caught.value, *says)


def test_tokenized_text_is_refused(llm: LLM) -> None:
    """`generate(tokenizer(text))` must not complete its keys "input_ids" and "attention_mask"."""
    encoded = byte_tokenizer()("Hello")
    with pytest.raises(TypeError, match="input_ids"):
        llm.generate(encoded, GREEDY, use_tqdm=False)
    with pytest.raises(TypeError, match=r"prompts\[0\]: .*input_ids"):
        llm.generate([encoded], GREEDY, use_tqdm=False)


def test_invalid_unicode_is_a_clear_error(llm: LLM) -> None:
    """A lone surrogate, as from a file read with `surrogateescape`."""
    with pytest.raises((TypeError, ValueError)) as caught:
        llm.generate(["good", "a\ud800b"], GREEDY, use_tqdm=False)
    assert_says(caught.value, "prompts[1]")
    assert "TextEncodeInput" not in str(caught.value), "the message shows the tokenizer's own types"
    assert r"\ud800" in str(caught.value), "the message does not show what is wrong with the text"


def test_text_outside_the_models_vocabulary_is_refused(tmp_path: Path) -> None:
    """If a tokenizer is larger than the embedding, its last ids would end a CUDA process."""
    with make_llm(
        make_model(tmp_path, vocab_size=250, eos_token_id=None, pad_token_id=None)
    ) as llm:
        with pytest.raises(ValueError, match=r"prompts\[1\]") as caught:
            llm.generate(["good", "bad <|eos|>"], GREEDY, use_tqdm=False)
        assert_says(caught.value, "257", "[0, 249]")
        assert llm.is_finished()
        assert len(llm.generate("good", GREEDY, use_tqdm=False)[0]["token_ids"]) == 4


def test_the_longest_prompt_leaves_room_for_one_token(model_dir: Path) -> None:
    with make_llm(model_dir) as llm:
        (output,) = llm.generate([1] * (MAX_LEN - 1), GREEDY, use_tqdm=False)
    assert (len(output["token_ids"]), output["finish_reason"]) == (1, "length")
    assert output["num_prompt_tokens"] == MAX_LEN - 1


def test_text_without_a_tokenizer_is_refused(model_dir: Path, tmp_path: Path) -> None:
    """Token ids still work."""
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    with make_llm(tmp_path) as llm:
        with pytest.raises(ValueError, match=r"prompts\[1\]: .*no tokenizer.*token ids"):
            llm.generate([[1, 2], "text"], GREEDY, use_tqdm=False)
        (output,) = llm.generate([1, 2], GREEDY, use_tqdm=False)
        assert (output["text"], len(output["token_ids"])) == ("", 4)


# Parameters


@pytest.mark.parametrize(
    ("params", "error", "says"),
    [
        ([GREEDY], ValueError, ["sampling_params", "2", "got 1"]),
        ([GREEDY] * 3, ValueError, ["sampling_params", "2", "got 3"]),
        ([], ValueError, ["sampling_params", "2", "got 0"]),
        ([GREEDY, None], TypeError, ["[1]", "SamplingParams", "None"]),
        ([GREEDY, {"max_tokens": 1}], TypeError, ["[1]", "SamplingParams", "max_tokens"]),
        ([0.7, GREEDY], TypeError, ["[0]", "SamplingParams", "0.7"]),
        ({"temperature": 0}, TypeError, ["sampling_params", "temperature"]),
        (0.7, TypeError, ["sampling_params", "0.7"]),
        (0, TypeError, ["sampling_params", "0"]),
        (False, TypeError, ["sampling_params", "False"]),
        ("greedy", TypeError, ["sampling_params", "greedy"]),
        ("", TypeError, ["sampling_params", "''"]),
        (SamplingParams, TypeError, ["sampling_params", "SamplingParams"]),
        ({GREEDY: 1}.keys(), TypeError, ["sampling_params"]),
    ],
    ids=lambda value: str(value)[:24],
)
def test_generate_refuses_bad_parameters(
    llm: LLM, params: Any, error: type[Exception], says: list[str]
) -> None:
    """Lists are not cut off or repeated to fit; dicts and numbers are not ignored."""
    with pytest.raises(error) as caught:
        llm.generate(["good", [1, 2]], params, use_tqdm=False)
    assert_says(caught.value, *says)


@pytest.mark.parametrize("params", [{}, [], 0, False, "", {"temperature": 0}, [GREEDY], 0.7])
def test_add_request_refuses_bad_parameters(llm: LLM, params: Any) -> None:
    """Only None stands for the defaults, not any empty or false value."""
    with pytest.raises(TypeError, match="sampling_params must be a SamplingParams") as caught:
        llm.add_request("good", params)
    assert_says(caught.value, repr(params)[:20])


@pytest.mark.parametrize("token_id", [259, 10**20])
def test_a_stop_token_id_outside_the_vocabulary_is_refused(llm: LLM, token_id: int) -> None:
    """No token can equal it."""
    bad = SamplingParams(stop_token_ids=[5, token_id])
    with pytest.raises(ValueError, match=r"prompts\[1\]") as caught:
        llm.generate(["good", "good"], [GREEDY, bad], use_tqdm=False)
    assert_says(caught.value, "stop_token_ids", IDS_RANGE, str(token_id))
    with pytest.raises(ValueError, match="stop_token_ids") as caught:
        llm.add_request("good", bad)
    assert_says(caught.value, IDS_RANGE, str(token_id))


# Options


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"max_model_len": 513}, ValueError, ["max_model_len", "513", "512"]),
        ({"max_model_len": 10**30}, ValueError, ["max_model_len", str(10**30), "512"]),
        ({"max_model_len": 129}, ValueError, ["max_model_len", "129", "128", "32 blocks of 4"]),
        (
            {"max_model_len": None, "num_kvcache_blocks": 1, "kvcache_block_size": 1},
            ValueError,
            ["1 token", "2", "num_kvcache_blocks"],
        ),
        (
            {"num_kvcache_blocks": None, "cpu_kvcache_gib": 1e-9},
            ValueError,
            ["cpu_kvcache_gib=1e-09", "one block"],
        ),
        (
            {"num_kvcache_blocks": None, "cpu_kvcache_gib": 1e-5},
            ValueError,
            ["max_model_len=64", "20 tokens"],
        ),
        ({"num_kvcache_blocks": None, "cpu_kvcache_gib": 0}, ValueError, ["cpu_kvcache_gib=0"]),
        (  # more than an address space, so that no system can reserve it
            {"num_kvcache_blocks": 2**31 - 1, "kvcache_block_size": 512},
            (ValueError, MemoryError),
            ["num_kvcache_blocks"],
        ),
        ({"num_kvcache_blocks": 10**20}, (ValueError, MemoryError), ["num_kvcache_blocks"]),
        (
            {"num_kvcache_blocks": None, "cpu_kvcache_gib": 1e9},
            (ValueError, MemoryError),
            ["cpu_kvcache_gib"],
        ),
        (
            {"num_kvcache_blocks": None, "cpu_kvcache_gib": 1e300},
            (ValueError, MemoryError),
            ["cpu_kvcache_gib"],
        ),
        ({"attention_backend": "flash_attn"}, ValueError, ["flash_attn", "CUDA", "'cpu'"]),
        (
            {"tensor_parallel_size": 3},
            ValueError,
            ["tensor_parallel_size=3", "num_attention_heads=4", "num_key_value_heads=2", "1, 2, 4"],
        ),
        ({"max_seqs": 3}, TypeError, ["'max_seqs'", "'max_num_seqs'"]),
        ({"gpu_memory_utilisation": 0.5}, TypeError, ["'gpu_memory_utilization'"]),
        ({"tokenizer": "/no/such/place"}, OSError, ["tokenizer", "/no/such/place"]),
        ({"tokenizer": "no-such/tokenizer"}, OSError, ["tokenizer", "no-such/tokenizer"]),
        ({"device": "gpu"}, ValueError, ["device", "'gpu'", "'cpu'"]),
        ({"dtype": "int8"}, ValueError, ["dtype", "'int8'", "'bfloat16'"]),
        ({"load_format": "gguf"}, ValueError, ["load_format", "'gguf'", "'dummy'"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_bad_option_is_refused_by_name(
    model_dir: Path,
    options: dict[str, Any],
    error: type[Exception] | tuple[type[Exception], ...],
    says: list[str],
) -> None:
    """Options are not clamped or ignored."""
    with pytest.raises(error) as caught:
        make_llm(model_dir, **options)
    assert_says(caught.value, *says)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_cuda_without_a_device_is_refused(model_dir: Path, device: str) -> None:
    with pytest.raises(ValueError, match="CUDA") as caught:
        make_llm(model_dir, device=device)
    assert_says(caught.value, f"device={device!r}", "'cpu'")


@pytest.mark.cuda
def test_a_missing_cuda_device_is_refused(model_dir: Path) -> None:
    with pytest.raises(ValueError, match="device='cuda:99'"):
        make_llm(model_dir, device="cuda:99")


def test_a_long_text_is_one_error_and_no_warning(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would warn of its own limit first, in a prompt and in a conversation."""
    tokenizer, warned = llm.tokenizer, dict[str, bool]()
    monkeypatch.setattr(tokenizer, "model_max_length", 8)
    monkeypatch.setattr(tokenizer, "deprecation_warnings", warned)  # of which it keeps a list
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content }}")
    with pytest.raises(ValueError, match=LENGTHS):
        llm.generate("x" * MAX_LEN, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=LENGTHS):
        llm.chat([{"role": "user", "content": "x" * MAX_LEN}], GREEDY, use_tqdm=False)
    assert warned == {}


def test_a_lowered_max_model_len_is_logged_once(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Users see the limit before prompts are refused for it."""
    with (
        caplog.at_level(logging.WARNING, logger="nanovllm"),
        make_llm(model_dir, max_model_len=None) as llm,
    ):
        llm.generate([[1] * 100, [2] * 127], GREEDY, use_tqdm=False)
        assert llm.config.max_model_len == 128
    (record,) = [record for record in caplog.records if "max_model_len" in record.getMessage()]
    assert_says(ValueError(record.getMessage()), "128", "512", "KV pool")


def test_given_limits_that_fit_are_kept(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are neither lowered nor warned about."""
    with make_llm(model_dir, max_model_len=128) as llm:
        assert llm.config.max_model_len == 128
        assert (llm.config.num_kvcache_blocks, llm.config.kvcache_block_size) == (32, 4)
    assert caplog.text == ""


def test_a_refused_engine_frees_its_memory(model_dir: Path) -> None:
    """The constructor fails after the model is loaded: a loop over sizes must not leak models."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc")

    def resident_pages() -> int:
        return int(statm.read_text().split()[1])

    def refused() -> None:
        with pytest.raises(ValueError, match="does not fit"):
            make_llm(model_dir, max_model_len=129)

    refused()
    before = resident_pages()
    for _ in range(10):
        refused()
    assert (resident_pages() - before) * 4096 < 8 * 2**20


@pytest.mark.parametrize(
    "make",
    [
        lambda: SamplingParams(max_tokens=0),
        lambda: SamplingParams(max_tokens=-1),
        lambda: SamplingParams(max_tokens=1.5),  # type: ignore[arg-type]
        lambda: SamplingParams(temperature=-1),
        lambda: SamplingParams(temperature=math.nan),
        lambda: SamplingParams(top_k=-5),
        lambda: SamplingParams(n=0),
        lambda: SamplingParams(stop=""),
    ],
)
def test_impossible_sampling_parameters_are_refused(make: Callable[[], SamplingParams]) -> None:
    with pytest.raises((ValueError, TypeError)):
        make()
