"""All blocks in one call on the CPU: equal bit for bit to one call after the other."""

import ctypes
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import PRODUCTS
from families.describe import Sample, write
from families.gemma import SAMPLES as GEMMA
from gguf_files import write_gguf
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.cpu import library
from nanovllm.layers import whole_blocks

pytestmark = [pytest.mark.usefixtures("compiler"), pytest.mark.usefixtures("one_thread")]

COMPUTE = whole_blocks.compute_few_rows
Rows = list[int]


class Case(NamedTuple):
    """A sample of a family, with matrices of a kind."""

    sample: Sample
    dtype: str
    options: Mapping[str, Any] = {}
    gguf: bool = False


def types(name: str, shape: tuple[int, ...]) -> str:
    """Types that let the projections of a layer be matrices of two kinds."""
    if len(shape) == 1:
        return "F32"
    return "Q8_0" if "attn_v" in name or "ffn_gate" in name else "Q4_1"


LLAMA, QWEN2, QWEN3 = (Sample(f"{name}ForCausalLM") for name in ("Llama", "Qwen2", "Qwen3"))
UNROTATED = Sample("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]})
CASES = {
    "plain": Case(LLAMA, "float32"),
    "biases": Case(QWEN2, "bfloat16"),
    "head norms": Case(QWEN3, "bfloat16"),
    "norms after parts, caps, windows": Case(GEMMA["Gemma 2"], "float32"),
    "wide norms, two ropes": Case(GEMMA["Gemma 3"], "bfloat16"),
    "no rotation": Case(UNROTATED, "float32"),
    "int8": Case(QWEN3, "bfloat16", {"quantization": "int8"}),
    "int4": Case(QWEN2, "float32", {"quantization": "int4"}),
    "int4 in blocks": Case(LLAMA, "bfloat16", {"quantization": "int4"}),
    "joined": Case(LLAMA, "float32", gguf=True),
    "joined, bfloat16": Case(QWEN3, "bfloat16", gguf=True),
    "quantized cache": Case(GEMMA["Gemma 3"], "bfloat16", {"kv_cache_dtype": "fp8"}),
}


def one_by_one(blocks: list[Any], x: torch.Tensor, ropes: Any, norm: Any) -> torch.Tensor:
    """What the decoder computes without the one call."""
    residual = None
    for block in blocks:
        x, residual = block.enter(x, residual)
        x, residual = block(x, residual, ropes)
    normed: torch.Tensor = norm.add(x, residual)[0]
    return normed


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Let each step of few rows be computed in both ways; the numbers of rows where they agree."""
    rows: Rows = []

    def compute(
        few: Any, blocks: list[Any], x: torch.Tensor, ropes: Any, norm: Any, *rest: Any
    ) -> Any:
        computed = COMPUTE(few, blocks, x, ropes, norm, *rest)
        assert computed is not None
        first = [block.parts.mixer.attn.kv.k_cache.clone() for block in blocks]
        assert torch.equal(computed[0], one_by_one(blocks, x, ropes, norm))
        for block, keys in zip(blocks, first, strict=True):
            again = block.parts.mixer.attn.kv.k_cache
            assert torch.equal(again.view(torch.uint8), keys.view(torch.uint8))
        rows.append(len(x))
        return computed

    monkeypatch.setattr(whole_blocks, "compute_few_rows", compute)
    return rows


def made(folder: Path, case: Case) -> str:
    path = write(folder / "model", case.sample)
    if not case.gguf:
        return str(path)
    write_gguf(path, folder / "model.gguf", types)
    return str(folder / "model.gguf")


def generate(llm: LLM, requests: int) -> None:
    """Requests that end one after the other."""
    params = [SamplingParams(max_tokens=3 + n % 4, ignore_eos=True) for n in range(requests)]
    llm.generate([[5 + n, *range(7, 20 + n)] for n in range(requests)], params, use_tqdm=False)


def engine(path: str, case: Case) -> LLM:
    options: dict[str, Any] = dict(num_kvcache_blocks=64, max_model_len=128, kvcache_block_size=16)
    return LLM(path, device="cpu", dtype=case.dtype, **options, **case.options)


@pytest.mark.parametrize("name", CASES)
def test_one_call_equals_one_call_after_the_other(
    name: str, tmp_path: Path, both: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For few rows, and for so many that blocks are multiplied in another way."""
    PRODUCTS["tiled"].use(monkeypatch)
    case = CASES[name]
    with engine(made(tmp_path, case), case) as llm:
        generate(llm, 2)
        generate(llm, 12 if case.gguf else 1)
    assert {1, 2} <= set(both) and (not case.gguf or 12 in both)


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "sinks": ("plain", {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
    "fixed scales": ("quantized cache", {"fixed_scales": (0.5, 0.25)}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_settings_of_attention_reach_its_kernels(
    name: str, tmp_path: Path, both: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of layers that few models have, in a model that lacks them."""
    PRODUCTS["tiled"].use(monkeypatch)
    of, changes = CHANGES[name]
    with engine(made(tmp_path, CASES[of]), CASES[of]) as llm:
        for attention in llm.model_runner.shard.model.attentions:
            attention.kv = replace(attention.kv, **changes)
        generate(llm, 1)
    assert both


def test_two_threads_share_each_part(
    tmp_path: Path, both: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part begins when all threads have finished the one before: it reads what they wrote."""
    PRODUCTS["tiled"].use(monkeypatch)
    case = CASES["joined, bfloat16"]
    torch.set_num_threads(2)
    try:
        with engine(made(tmp_path, case), case) as llm:
            generate(llm, 3)
    finally:
        torch.set_num_threads(1)
    assert {1, 2, 3} <= set(both)


def test_structures_follow_replaced_matrices_and_caches(
    tmp_path: Path, both: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed memory would be read after an update of weights or after sleep, or never be freed."""
    PRODUCTS["tiled"].use(monkeypatch)
    case = CASES["head norms"]._replace(options={"enable_sleep_mode": True})
    path = made(tmp_path, case)
    weights = load_file(Path(path) / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    with engine(path, case) as llm:
        few_rows = llm.model_runner.shard.model.model.few_rows
        generate(llm, 1)
        llm.update_weights([(name, weights[name] * 2)])
        generate(llm, 1)
        for level in (1, 2):
            llm.sleep(level=level)
            freed = [*few_rows._caches, *(few_rows._matrices if level == 2 else ())]
            assert all(reference() is None for reference in freed)
            llm.wake_up()
            if level == 2:
                llm.update_weights([*weights.items()])
            generate(llm, 1)
    assert len(both) == 4 * 2


@pytest.mark.parametrize("name", ["biases", "head norms"])
def test_structures_follow_replaced_small_tensors(
    name: str, tmp_path: Path, both: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed memory of norms and biases would be read after a function of the caller's."""
    PRODUCTS["tiled"].use(monkeypatch)
    case = CASES[name]
    with engine(made(tmp_path, case), case) as llm:
        generate(llm, 1)
        decoder = llm.model_runner.shard.model.model
        for module in decoder.layers[1].modules():
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data * 2  # the old memory is freed
        decoder.norm.weight = torch.nn.Parameter(decoder.norm.weight * 2)
        generate(llm, 1)
        assert decoder.few_rows._made._last.weight == decoder.norm.weight.data_ptr()
    assert len(both) == 2 * 2


REGISTER: dict[str, Any] = {
    "hook": torch.nn.Module.register_forward_hook,
    "pre-hook": torch.nn.Module.register_forward_pre_hook,
    "global": lambda _, hook: torch.nn.modules.module.register_module_forward_hook(hook),
}


@pytest.mark.parametrize("kind", ["forward", *REGISTER])
def test_modules_with_hooks_are_called(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller who looks inside the model would miss all decode steps."""
    PRODUCTS["tiled"].use(monkeypatch)
    calls: list[int] = []

    def look(module: Any, *_: Any) -> None:
        if module is layer:
            calls.append(0)

    case = CASES["plain"]
    with engine(made(tmp_path, case), case) as llm:
        model = llm.model_runner.shard.model.model
        layer = model.layers[1].mlp.down_proj
        plain = layer.forward
        if kind == "forward":
            layer.forward = lambda *args: look(layer) or plain(*args)
            remove = partial(delattr, layer, "forward")
        else:
            remove = REGISTER[kind](layer, look).remove
        generate(llm, 1)
        remove()
        generate(llm, 1)
        assert len(calls) == 3 and model.few_rows._made is not None


def test_without_a_compiler_each_kernel_has_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails if the first request compiles, and breaks off."""
    PRODUCTS["tiled"].use(monkeypatch)
    load = library.load

    def fail(source: Path, *rest: Any) -> Any:
        if source.stem == "whole_blocks":
            raise RuntimeError("no C++ compiler that works")
        return load(source, *rest)

    monkeypatch.setattr(library, "load", fail)
    monkeypatch.setattr(library, "_loaded", set())
    case = CASES["plain"]
    with engine(made(tmp_path, case), case) as llm:
        assert llm.model_runner.shard.model.model.few_rows is None
        generate(llm, 1)
    assert "no C++ compiler that works" in caplog.text


def test_other_steps_and_matrices_are_computed_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with adapters, wanted residuals, more rows; matrices that PyTorch multiplies."""
    PRODUCTS["tiled"].use(monkeypatch)
    case, rows = CASES["plain"], []

    def compute(few: Any, blocks: Any, x: torch.Tensor, *rest: Any) -> Any:
        rows.append(len(x))
        with monkeypatch.context() as changed:
            changed.setattr(whole_blocks, "adapter_rows", object)
            assert COMPUTE(few, blocks, x, *rest) is None
        assert COMPUTE(few, blocks, x, *rest[:2], (1,)) is None
        return COMPUTE(few, blocks, x, *rest)

    monkeypatch.setattr(whole_blocks, "compute_few_rows", compute)
    monkeypatch.setattr(whole_blocks.OneCall, "most_rows", 2)
    path = made(tmp_path, case)
    with engine(path, case) as llm:
        generate(llm, 3)
        assert llm.model_runner.shard.model.model.few_rows._made is not None
    assert rows and set(rows) <= {1, 2}
    PRODUCTS["plain"].use(monkeypatch)
    with engine(path, case) as llm:
        assert llm.model_runner.shard.model.model.few_rows is None


@pytest.mark.parametrize(("name", "is_used"), [("int8", True), ("plain", False)])
def test_the_pool_works_for_models_whose_matrices_are_all_ours(
    name: str, is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On processors where oneDNN multiplies plain matrices, in PyTorch's threads."""
    PRODUCTS["plain"].use(monkeypatch)
    monkeypatch.setattr(library, "_pool_is_wanted", threading.Event())
    case = CASES[name]
    with engine(made(tmp_path, case), case):
        assert library._pool_is_wanted.is_set() == is_used
    if is_used:
        pool, own = (
            ctypes.c_void_p.in_dll(library.library(), name).value for name in ("pool", "shared_run")
        )
        assert own == pool
