"""The choice of a backend, and the whole engine on Triton's kernels against plain PyTorch."""

import ast
import builtins
import importlib
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import PRODUCTS, make_model

from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems
from nanovllm.kernels.cpu import tiled_linear
from nanovllm.kernels.kv_layer import CODES, KVLayer
from nanovllm.kernels.table import PLAIN
from nanovllm.kernels.triton import common
from nanovllm.kernels.triton.common import can_copy_tiles
from nanovllm.layers.backend import AttentionSpec, Backend, TorchBackend
from nanovllm.layers.backends import choice, choose_backend
from nanovllm.layers.backends.cpu import CpuBackend
from nanovllm.layers.backends.flash_attn import FlashAttnBackend
from nanovllm.layers.backends.triton import TritonBackend
from nanovllm.layers.context import Context

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")


def spec(device: str = "cpu", **changes: Any) -> AttentionSpec:
    options: dict[str, Any] = dict(
        device=torch.device(device), dtype=torch.float32, num_heads=4, num_kv_heads=2, head_dim=16,
        block_size=None, in_graphs=True,
    )  # fmt: skip
    options |= changes
    return AttentionSpec(**{"kv_dtype": options["dtype"]} | options)


# The choice


def test_auto_on_the_cpu_is_never_triton(kernel_device: str) -> None:
    """Triton's interpreter works there, but a thousand times slower."""
    assert choose_backend("auto", spec()).attention.name in ("cpu", "torch")
    backend = choose_backend("auto", spec(head_dim=20))
    assert backend.attention.name == "torch" and backend.kernels is PLAIN


@pytest.mark.usefixtures("compiler")
def test_a_backend_must_fit_all_heads() -> None:
    fits, does_not = spec(num_kv_heads=1, head_dim=32), spec(head_dim=20)
    backend = choose_backend("cpu", spec(), fits)
    for each in (spec(), fits):
        assert backend.attention_of(each.heads).heads == each.heads
    with pytest.raises(ValueError, match=r"no layer with heads \(4, 2, 20\)"):
        backend.attention_of(does_not.heads)
    with pytest.raises(ValueError, match=r"needs a head_dim that is a multiple of 8 .* got 20"):
        choose_backend("cpu", spec(), does_not)
    backend = choose_backend("auto", spec(), does_not)
    assert backend.attention.name == "torch" and backend.kernels is PLAIN
    assert backend.attention_of(fits.heads) is backend.attention, "its plans are for any heads"


def test_a_type_without_kernels_on_the_cpu_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Quantized weights are then dequantized in every step, in a type that CPUs emulate."""
    with caplog.at_level(logging.WARNING, "nanovllm"):
        assert choose_backend("auto", spec(dtype=torch.float16)).attention.name == "torch"
        (said,) = [record.message for record in caplog.records]
        assert "plain PyTorch" in said
        assert "needs dtype 'float32' or 'bfloat16', got 'float16'" in said
        caplog.clear()
        choose_backend("auto", spec(head_dim=20))
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "cpu",
            dict(head_dim=20),
            "needs a head_dim that is a multiple of 8 and at most 512, got 20",
        ),
        ("triton", {}, "needs a CUDA device, got device='cpu'"),
        ("flash_attn", {}, "needs a CUDA device, got device='cpu'"),
    ],
)
def test_no_error_names_plain_pytorch_where_it_has_no_order(
    name: str, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the error has a cause, it keeps it."""
    pytest.importorskip("triton")
    monkeypatch.setattr(common, "INTERPRETED", False)
    with pytest.raises(ValueError, match="'torch' works everywhere"):
        choose_backend(name, spec(**changes))
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        choose_backend(name, spec(one_order=True, **changes))
    assert "'torch'" not in str(caught.value) and caught.value.__cause__ is None

    def fails(_: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setitem(choice.KERNELS, "cpu", fails)
    with pytest.raises(
        ValueError, match=r"does not work here \(RuntimeError: no compiler\)$"
    ) as caught:
        choose_backend("cpu", spec(one_order=True))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_one_order_of_sums_has_a_backend_of_its_own(kernel_device: str) -> None:
    """It is tried as the other ones are; codes are always read from the cache."""
    from nanovllm.layers.backends.triton_ordered import OrderedTritonBackend

    options = dict(device=kernel_device, one_order=True, block_size=16)
    plain = choice.attention_class("triton", one_order=True)(spec(**options))
    codes = choice._build_attention("triton", spec(**options, kv_dtype=CODES, head_dim=32))
    assert isinstance(plain, OrderedTritonBackend) and not plain.reads_cache
    assert isinstance(codes, OrderedTritonBackend) and codes.reads_cache
    assert not isinstance(choice._build_attention("triton", spec(**options | {"one_order": False})),
                          OrderedTritonBackend)  # fmt: skip


def test_one_order_of_sums_has_kernels_for_latents(kernel_device: str) -> None:
    from nanovllm.kernels.triton.attention import ordered_latent_decode

    options: dict[str, Any] = dict(device=kernel_device, num_kv_heads=1, value_width=16)
    for one_order in (True, False):
        backend = choice._build_attention("triton", spec(**options, one_order=one_order))
        is_ordered = backend.decode_attention is ordered_latent_decode.ordered_latent_decode
        assert is_ordered == one_order
        assert (
            getattr(backend.prefill_attention, "keywords", {}) == {"one_order": True}
        ) == one_order


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_backends_for_cuda_are_refused_elsewhere(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "INTERPRETED", False)
    with pytest.raises(ValueError, match=f"attention_backend='{name}' needs a CUDA device") as e:
        choose_backend(name, spec())
    assert "device='cpu'" in str(e.value) and "'torch' works everywhere" in str(e.value)


@pytest.mark.parametrize("eager", [False, True])
def test_tiles_are_copied_only_in_graphs(kernel_device: str, eager: bool) -> None:
    backend = choose_backend("triton", spec(kernel_device, in_graphs=not eager))
    one = torch.ones(1, dtype=torch.int32, device=kernel_device)
    context = Context(False, slot_mapping=one, context_lens=one, block_tables=one[None])
    backend.attention.plan(context)
    can = can_copy_tiles(torch.device(kernel_device))
    assert context.plan.copies_tiles == (can and not eager)


@pytest.mark.parametrize("eager", [False, True])
def test_the_backend_knows_whether_steps_are_graphs(
    model_dir: Path, kernel_device: str, eager: bool
) -> None:
    options: dict[str, Any] = dict(device=kernel_device, enforce_eager=eager)
    with LLM(model_dir, attention_backend="triton", num_kvcache_blocks=8, **options) as llm:
        backend = llm.model_runner.shard.backend.attention
    assert isinstance(backend, TritonBackend) and backend.copies_tiles != eager


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make `import package` fail, as where it is not installed."""
    real = builtins.__import__

    def refusing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(f"No module named {package!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refusing)
    kernels = "nanovllm.kernels."
    for name in [n for n in sys.modules if n.startswith(kernels) or n.split(".")[0] == package]:
        if "triton" in vars(sys.modules[name]) or name.split(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)


def test_a_missing_flash_attn_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says how to install it, and what needs no installation."""
    without(monkeypatch, "flash_attn")
    with pytest.raises(ValueError, match="cannot import flash-attn") as e:
        choose_backend("flash_attn", spec("cuda", dtype=torch.bfloat16))
    assert "pip install flash-attn --no-build-isolation" in str(e.value)
    assert "'triton' needs nothing more" in str(e.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(dtype=torch.float32), "needs dtype 'float16' or 'bfloat16', got 'float32'"),
        (dict(dtype=torch.float16, block_size=64), "a multiple of 256, got 64"),
        (dict(dtype=torch.float16, needs=frozenset({"sinks"})), "attention with sinks; 'triton'"),
    ],
)
def test_flash_attn_refuses_what_it_cannot_compute(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_backend("flash_attn", spec("cuda", **changes))


def test_flash_attn_has_a_block_table_for_each_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel aligns the queries of a sequence at their end, where unused ones are."""
    functions = SimpleNamespace(flash_attn_varlen_func=None, flash_attn_with_kvcache=None)
    monkeypatch.setitem(sys.modules, "flash_attn", functions)  # type: ignore[arg-type]
    context = Context(
        is_prefill=False, slot_mapping=torch.arange(4), context_lens=torch.tensor([5, 6, 9, 0]),
        block_tables=torch.tensor([[0, 1, 2], [3, 4, 5]]), num_queries=2,
    )  # fmt: skip
    FlashAttnBackend(spec()).plan(context)
    assert context.block_tables is not None
    assert context.block_tables.tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]


def test_flash_attn_cannot_read_codes() -> None:
    """And "auto" takes another backend."""
    of_codes = dict(dtype=torch.bfloat16, kv_dtype=CODES)
    with pytest.raises(ValueError, match="needs kv_cache_dtype='auto', it cannot read 'fp8'") as e:
        choose_backend("flash_attn", spec("cuda", **of_codes))
    assert "'triton' needs nothing more" in str(e.value)
    assert choose_backend("auto", spec(**of_codes)).attention.name in ("cpu", "torch")


@pytest.mark.parametrize("name", ["cpu", "triton"])
@pytest.mark.parametrize("what", ["norm_rope_store", "decode_attention", "prefill_attention"])
def test_kernels_for_codes_are_tried_at_the_start(
    what: str, name: str, kernel_device: str, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both that store codes and those that read them: one may not compile where others do."""
    room = "triton.attention" if name == "triton" else name
    module = importlib.import_module(f"nanovllm.kernels.{room}.{what}")
    real = getattr(module, what)

    def checking(*args: Any) -> Any:
        if any(isinstance(x, KVLayer) and x.k_scales is not None for x in args):
            raise RuntimeError("no codes here")
        return real(*args)

    monkeypatch.setattr(module, what, checking)
    monkeypatch.setattr(CpuBackend, what, staticmethod(checking), raising=False)
    choose_backend(name, spec(kernel_device if name == "triton" else "cpu"))
    with pytest.raises(ValueError, match="no codes here"):
        choose_backend(name, spec(kernel_device if name == "triton" else "cpu", kv_dtype=CODES))


def test_the_product_of_plain_weights_is_tried_at_the_start(
    compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a library of its own, which may not compile where others do."""

    def broken(*args: Any) -> None:
        raise RuntimeError("no room for libraries")

    PRODUCTS["tiled"].use(monkeypatch)
    assert choose_backend("auto", spec()).attention.name == "cpu"
    monkeypatch.setattr(tiled_linear, "constant", broken)
    assert choose_backend("auto", spec()).attention.name == "torch"
    with pytest.raises(ValueError, match="no room for libraries"):
        choose_backend("cpu", spec())


def test_interpreted_kernels_are_refused_on_a_gpu(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TRITON_INTERPRET in the environment, each kernel would copy its tensors to the host."""
    monkeypatch.setattr(common, "INTERPRETED", True)
    with pytest.raises(ValueError, match=r"'triton' does not work here .*TRITON_INTERPRET is set"):
        choose_backend("triton", spec("cuda"))


def test_a_head_too_small_for_a_matrix_product_is_refused(kernel_device: str) -> None:
    with pytest.raises(ValueError, match="needs a head_dim of 16 or more, got 8"):
        choose_backend("triton", spec(kernel_device, head_dim=8))


def test_a_missing_triton_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "triton")
    with pytest.raises(ValueError, match=r"cannot import Triton .*'torch' needs none"):
        choose_backend("triton", spec())


@pytest.mark.parametrize("broken", range(3))
@pytest.mark.parametrize(
    ("capability", "order"),
    [((9, 0), ["triton", "flash_attn", "torch"]), ((8, 0), ["flash_attn", "triton", "torch"])],
)
def test_auto_takes_the_first_backend_that_works(
    capability: tuple[int, int],
    order: list[str],
    broken: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where none works, a warning says why: plain PyTorch is slow on a GPU."""

    def build(name: str, spec: AttentionSpec) -> Backend:
        if name in order[:broken]:
            raise ValueError("this one has no compiler")
        attention = TorchBackend()
        attention.name = name
        return Backend(attention, PLAIN)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(choice, "build_backend", build)
    with caplog.at_level(logging.WARNING, "nanovllm"):
        chosen = choose_backend("auto", spec("cuda")).attention
    assert chosen.name == order[broken]
    said = [record.message for record in caplog.records]
    if chosen.name != "torch":
        assert not said
    else:
        assert len(said) == 1 and said[0].count("this one has no compiler") == 2


def test_a_backend_that_does_not_run_is_refused_at_once(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton can be imported without a C compiler, but not run."""
    from nanovllm.kernels.triton.attention import decode_attention

    def broken(*args: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(decode_attention, "decode_attention", broken)
    with pytest.raises(ValueError, match=r"'triton' does not work here .*C compiler.*'torch'"):
        choose_backend("triton", spec(kernel_device))


def test_the_reason_has_a_compilers_first_and_last_line(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's errors: first a line with the place, then the source, last the error itself."""
    from triton.compiler.errors import CompilationError

    from nanovllm.kernels.triton.attention import prefill_attention

    tree = ast.parse("def f():\n    foo(1)")

    def broken(*args: Any) -> None:
        raise CompilationError("def f():\n    foo(1)", tree.body[0].body[0], "foo is not defined")

    monkeypatch.setattr(prefill_attention, "prefill_attention", broken)
    with pytest.raises(ValueError, match=r"CompilationError: at 2:.*foo is not defined"):
        choose_backend("triton", spec(kernel_device))


def test_the_choice_is_logged(
    kernel_device: str, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = dict(num_kvcache_blocks=8, kvcache_block_size=16)
    for name, others in (("triton", "Triton"), ("torch", "plain PyTorch")):
        caplog.clear()
        with (
            caplog.at_level(logging.INFO, "nanovllm"),
            LLM(model_dir, device=kernel_device, attention_backend=name, **options),
        ):
            lines = [r.message for r in caplog.records if "attention:" in r.message]
        assert len(lines) == 1
        assert lines[0].endswith(f"attention: {name}, other kernels: {others}")


# The engine on Triton's kernels. Interpreted, a token takes 0.1 s: few tokens, and everything that
# the scheduler can do to a request.


def run(path: Path, backend: str, device: str, prompts: Any, params: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = dict(
        device=device, dtype="float32", attention_backend=backend, kvcache_block_size=16,
        num_kvcache_blocks=64, enforce_eager=True,
    )  # fmt: skip
    with LLM(path, **defaults | options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [out["token_ids"] for out in outputs]


@pytest.mark.slow
def test_the_embedded_model_adds_on_triton(kernel_device: str) -> None:
    """Greedy and sampled in one batch: the same tokens, and the sums are right."""
    problems = sample_problems(3)
    prompts = [question for question, _ in problems] * 2
    params = [SamplingParams(temperature=0, max_tokens=5)] * 3
    params += [SamplingParams(temperature=1.2, seed=i, max_tokens=5) for i in range(3)]
    runs = [
        run(EMBEDDED_MODEL, name, kernel_device, prompts, params, dtype="float32")
        for name in ("torch", "triton")
    ]
    assert runs[0] == runs[1]


@pytest.mark.sampled(share=0.4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(max_num_batched_tokens=24),  # chunks
        dict(num_kvcache_blocks=6, max_num_seqs=4),  # preemption
        dict(kvcache_block_size=4),  # smaller than any tile, and prefix hits
    ],
    ids=["chunks", "preemption", "small blocks"],
)
def test_scheduling_does_not_change_triton_outputs(
    options: dict[str, Any], kernel_device: str, model_dir: Path
) -> None:
    shared = [(7 * i) % 259 for i in range(34)]
    prompts = [shared, shared[:20], [*shared[:33], 5, 6, 7], [3]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = run(model_dir, "torch", kernel_device, prompts, params, num_kvcache_blocks=200)
    assert run(model_dir, "triton", kernel_device, prompts, params, **options) == expected


@pytest.mark.sampled(share=0.4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {},
        dict(family="Phi3", partial_rotary_factor=0.5, sliding_window=20),
        dict(family="Qwen3Moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32),
    ],
    ids=["Qwen3", "Phi3", "Qwen3Moe"],
)
def test_graphs_do_not_change_triton_outputs(
    shape: dict[str, Any], kernel_device: str, tmp_path: Path
) -> None:
    """Padded as for a captured graph: 3 rows in a batch of 4, with an unused last row."""
    model_dir = make_model(tmp_path, **shape)
    prompts = [[1, 2, 3], [(5 * i) % 259 for i in range(40)], [9]]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = run(model_dir, "torch", kernel_device, prompts, params)
    options: dict[str, Any] = dict(
        device=kernel_device, dtype="float32", attention_backend="triton", num_kvcache_blocks=64,
        kvcache_block_size=16, max_num_seqs=8,
    )  # fmt: skip
    with LLM(model_dir, **options) as llm:
        if kernel_device == "cpu":
            llm.model_runner.shard.graphs = llm.model_runner.shard.decode_graphs(
                llm.config.max_num_running
            )
        assert llm.model_runner.shard.graphs is not None
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [out["token_ids"] for out in outputs] == expected


def num_compiled() -> dict[str, int]:
    """The number of binaries of each kernel."""
    triton = pytest.importorskip("triton")
    names = ["attention.decode_attention", "attention.prefill_attention",
             "attention.norm_rope_store", "linear.rms_norm", "linear.silu_and_mul",
             "sampling.sample"]  # fmt: skip
    counts = {}
    for name in names:
        module = importlib.import_module(f"nanovllm.kernels.triton.{name}")
        for key, kernel in vars(module).items():
            if isinstance(kernel, triton.JITFunction):
                caches = [cache[0] for cache in kernel.device_caches.values()]
                counts[f"{name}.{key}"] = sum(map(len, caches))
    return counts


@pytest.mark.cuda
@pytest.mark.parametrize("eager", [False, True])
def test_no_step_compiles_a_kernel(model_dir: Path, eager: bool) -> None:
    """All kernels are compiled at the start, for any lengths and batch sizes."""
    options: dict[str, Any] = dict(
        device="cuda", attention_backend="triton", num_kvcache_blocks=300, max_num_seqs=200,
        max_num_batched_tokens=256, enforce_eager=eager,
    )  # fmt: skip
    with LLM(model_dir, **options) as llm:
        before = num_compiled()
        assert sum(map(bool, before.values())) >= 6, before  # a kernel of each module
        for num_prompts, length in ((1, 1), (2, 300), (3, 65), (17, 16), (150, 8), (2, 301)):
            prompts = [[(i * j) % 259 for j in range(length)] for i in range(num_prompts)]
            for temperature in (0, 1):
                params = SamplingParams(temperature=temperature, max_tokens=3, ignore_eos=True)
                llm.generate(prompts, params, use_tqdm=False)
        assert num_compiled() == before
