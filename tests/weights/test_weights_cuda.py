"""Weights that change on a GPU: graphs survive, memory is returned, handles are opened."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import make_adapter
from conftest import make_model, need_gpus
from safetensors.torch import load_file
from waiting import LIMIT

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.embedded import EMBEDDED_HEAD, EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems
from nanovllm.utils.resources import GIB
from nanovllm.weights.tensors import weights_of
from nanovllm.weights.virtual_memory import CHUNK, VirtualMemory

pytestmark = pytest.mark.cuda

IDS = [[3, 14, 15, 92, 65], [35, 89, 79], [*range(40)]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MOE = dict(
    family="Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip


def make_llm(path: Path | str, size: int = 1, **options: Any) -> LLM:
    need_gpus(size)
    defaults = dict(device="cuda", dtype="bfloat16", num_kvcache_blocks=64, max_model_len=128)
    return LLM(path, **defaults | dict(tensor_parallel_size=size, enable_sleep_mode=True) | options)


def generate(llm: LLM) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(IDS, GREEDY, use_tqdm=False)]


def addresses(llm: LLM) -> list[int]:
    return [tensor.data_ptr() for tensor in weights_of(llm.model_runner.shard.model)]


def used_bytes() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Two checkpoints of each kind."""
    home = tmp_path_factory.mktemp("models")
    kinds: dict[str, dict[str, Any]] = {
        "plain": {}, "tied": dict(tie_word_embeddings=True), "moe": MOE,
    }  # fmt: skip

    def make(kind: str, seed: int) -> Path:
        path = home / f"{kind}-{seed}"
        return path if path.exists() else make_model(path, seed=seed, **kinds[kind])

    return make


@pytest.fixture
def memory() -> Iterator[VirtualMemory]:
    """Memory that is freed."""
    made = VirtualMemory(CHUNK + 1, torch.device("cuda", torch.cuda.current_device()))
    yield made
    made.close()


def test_memory_keeps_its_address_and_saved_values(memory: VirtualMemory) -> None:
    memory.map(1)
    assert memory.mapped == CHUNK
    memory.map()
    assert memory.mapped == memory.num_bytes == 2 * CHUNK
    values = memory.bytes
    values[:1000].copy_(torch.arange(1000).to(torch.uint8))
    values[-1] = 7
    address, before = values.data_ptr(), used_bytes()
    memory.save()
    memory.unmap()
    assert before - used_bytes() == 2 * CHUNK
    memory.restore()
    assert values.data_ptr() == memory.bytes.data_ptr() == address
    assert torch.equal(values[:1000].cpu(), torch.arange(1000).to(torch.uint8))
    assert values[-1] == 7
    memory.unmap()
    memory.restore()
    assert not values.any(), "nothing was saved"


def test_memory_is_mapped_while_the_device_works(memory: VirtualMemory) -> None:
    """The KV pool is mapped while weights are copied. Also in a thread that is new to CUDA."""
    memory.map()
    memory.unmap()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    with ThreadPoolExecutor(1) as thread:
        thread.submit(memory.restore).result()
    assert not torch.cuda.current_stream().query(), "it has waited"
    assert not memory.bytes.any()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("plain", {}),
        ("plain", dict(enforce_eager=True)),
        ("plain", dict(quantization="fp8")),
        ("plain", dict(quantization="int8")),
        ("plain", dict(quantization="int4")),
        ("tied", {}),
        ("tied", dict(quantization="int8")),
        ("moe", {}),
        ("moe", dict(quantization="fp8")),
    ],
)
def test_graphs_survive_updates_and_sleep(
    kind: str, options: dict[str, Any], size: int, models: Callable[[str, int], Path]
) -> None:
    """bfloat16 tensors: routers' are held in the type that has their values exactly."""
    old, new = ({name: tensor.bfloat16() for name, tensor in
                 load_file(models(kind, seed) / "model.safetensors").items()}
                for seed in (0, 1))  # fmt: skip
    with make_llm(models(kind, 0), size, **options) as llm:
        llm.update_weights(old)
        before, places = generate(llm), addresses(llm)
        llm.update_weights({name: tensor.cuda() for name, tensor in new.items()})
        after = generate(llm)
        assert after != before and addresses(llm) == places
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up(["weights"])
            if level == 2:
                llm.update_weights(new)
            llm.wake_up(["kv_cache"])
            assert generate(llm) == after and addresses(llm) == places
        llm.update_weights(iter(old.items()))
        assert generate(llm) == before
    with make_llm(models(kind, 1), size, **options) as llm:
        llm.update_weights(new)
        assert generate(llm) == after


@pytest.mark.parametrize("size", [1, 2])
def test_tensors_of_several_types_and_devices_are_copied(
    size: int, models: Callable[[str, int], Path]
) -> None:
    """In one update: small ones are copied in groups of one device and type."""
    new = load_file(models("plain", 1) / "model.safetensors")
    kinds = [
        (device, dtype) for device in ("cpu", "cuda") for dtype in (torch.float32, torch.bfloat16)
    ]
    with make_llm(models("plain", 1), size) as llm:
        expected = generate(llm)
    with make_llm(models("plain", 0), size) as llm:
        before = generate(llm)
        llm.update_weights({n: t.to(*kinds[i % 4]) for i, (n, t) in enumerate(new.items())})
        assert generate(llm) == expected != before


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        dict(dtype="float32"),
        dict(kv_cache_dtype="fp8"),
        dict(speculative_config=dict(method="eagle3", model=EMBEDDED_HEAD,
                                     num_speculative_tokens=3)),
    ],
)  # fmt: skip
def test_the_embedded_model_adds_after_sleep(level: int, options: dict[str, Any]) -> None:
    problems = sample_problems(100)
    params = SamplingParams(temperature=0, max_tokens=12)
    with make_llm(EMBEDDED_MODEL, **options) as llm:

        def solve() -> list[str]:
            prompts = [prompt for prompt, _ in problems]
            return [out["text"] for out in llm.generate(prompts, params, use_tqdm=False)]

        before = solve()
        assert sum(text == answer for text, (_, answer) in zip(before, problems, strict=True)) > 97
        for _ in range(2):
            llm.sleep(level)
            llm.wake_up()
            assert solve() == before


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("options", [{}, dict(enforce_eager=True)])
def test_adapters_are_used_again_after_sleep(
    options: dict[str, Any], size: int, models: Callable[[str, int], Path], tmp_path: Path
) -> None:
    """Their slots sleep, too; decode graphs go on to read them."""
    adapter = LoRARequest("mine", make_adapter(models("plain", 0), tmp_path / "adapter"))
    with make_llm(models("plain", 0), size, enable_lora=True, **options) as llm:

        def answers() -> list[list[int]]:
            outputs = llm.generate(IDS, GREEDY, False, [None, adapter, adapter])
            return [output["token_ids"] for output in outputs]

        before = answers()
        assert before[0] == generate(llm)[0] and before[1:] != generate(llm)[1:]
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert answers() == before


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("options", [{}, dict(enable_lora=True, max_lora_rank=512)])
def test_sleep_returns_the_memory(options: dict[str, Any], level: int) -> None:
    """The driver counts. A few hundred MiB of kernels and workspaces stay."""
    torch.empty(1, device="cuda")
    start = used_bytes()
    options = options | dict(num_kvcache_blocks=None, gpu_memory_utilization=0.6)
    with make_llm(EMBEDDED_MODEL, **options) as llm:
        full = used_bytes() - start
        assert full > 10 * GIB
        llm.sleep(level)
        assert used_bytes() - start < 0.05 * full
        llm.wake_up()
        assert used_bytes() - start < 1.02 * full
    assert used_bytes() - start < 0.05 * full, "closing frees it"


def test_closing_while_asleep_frees_everything() -> None:
    llm = make_llm(EMBEDDED_MODEL)
    llm.sleep(2)
    llm.close()
    with make_llm(EMBEDDED_MODEL) as llm:
        generate(llm)


def _send(path: str, queue: Any, done: Any) -> None:
    """In another process: offer a checkpoint's tensors on the GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    tensors = {name: tensor.cuda() for name, tensor in load_file(path).items()}
    queue.put({name: reduce_tensor(tensor) for name, tensor in tensors.items()})
    done.wait(LIMIT)


@pytest.mark.parametrize("size", [1, 2])
def test_handles_of_another_process_are_opened(
    size: int, models: Callable[[str, int], Path]
) -> None:
    context = torch.multiprocessing.get_context("spawn")
    queue, done = context.Queue(), context.Event()
    path = str(models("plain", 1) / "model.safetensors")
    with make_llm(models("plain", 1), size) as llm:
        expected = generate(llm)
    process = context.Process(target=_send, args=(path, queue, done))
    process.start()
    try:
        handles = queue.get(timeout=LIMIT)
        with make_llm(models("plain", 0), size) as llm:
            llm.update_weights(handles)
            assert generate(llm) == expected
    finally:
        done.set()
        process.join(LIMIT)
