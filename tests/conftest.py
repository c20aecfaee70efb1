"""Small real models, made on the spot: random checkpoints and a byte-level tokenizer.

And where Triton's kernels are tested: on a CUDA device, or interpreted, by the same tests.
"""

import contextlib
import gc
import json
import logging
import os
import random
import shutil
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # hundreds of processes import the same files
    sys.dont_write_bytecode = False
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the hub reads it when it is imported
# Where `make` puts published models; so nothing is written to the user's cache.
os.environ.setdefault("NANOVLLM_CACHE", str(Path(__file__).parents[1] / ".venv" / "cache"))
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # so that tests listen to this machine alone
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's: Triton's interpreter multiplies tiles
if "PYTEST_XDIST_WORKER" in os.environ:  # one process for each core, and so one thread for each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start background jobs this way
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported, and transformers imports it.
    in_time = "triton" not in sys.modules or "TRITON_INTERPRET" in os.environ
    assert in_time, "TRITON_INTERPRET is set too late"
    os.environ["TRITON_INTERPRET"] = "1"

import costs
import ray_clusters
import selection
import sharing
import transformers
import zygote
from hypothesis import HealthCheck, settings
from selection import examples
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanovllm import LLM
from nanovllm.engine.requests.token_counts import TokenCounts
from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.draw_inputs import DrawInputs, draw_inputs
from nanovllm.engine.run.launched import Begun
from nanovllm.engine.run.transfer import upload, upload_all
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.kernels.cpu import processor
from nanovllm.kernels.cpu.library import library
from nanovllm.kernels.plain import packed_linear
from nanovllm.kernels.plain.packed_linear import packed_types
from nanovllm.layers.filters import Filters
from nanovllm.outputs import RequestOutput

SHAPE: dict[str, Any] = dict(
    vocab_size=259, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    rms_norm_eps=1e-6, tie_word_embeddings=False, attention_bias=False, bos_token_id=None,
    eos_token_id=257, pad_token_id=256,
)  # fmt: skip


EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)

# How long an example takes, or is drawn, fails no test: a busy machine may be slow.
settings.register_profile(
    "busy machine", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy machine")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One worker for each core, 8 at most; with a GPU none, as all would share its memory."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # pytest-xdist reads it
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return 0 if torch.cuda.is_available() else min(cores, 8)


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the plugins next to this file, with their options."""
    for plugin in (costs, selection, sharing):
        pluginmanager.register(plugin)


def pytest_configure(config: pytest.Config) -> None:
    """Let tests start processes of Python from a warm one, where tests run and there is no GPU."""
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests and not torch.cuda.is_available() and "NANOVLLM_TESTS_COLD" not in os.environ:
        zygote.install()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Compile the CPU's kernels once, before all workers need them at the same time."""
    with contextlib.suppress(RuntimeError):  # tests that need them say why there are none
        library()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Never search for garbage among the million objects that live as long as the run.

    Else each of the engine's and the tests' full collections would take half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip CUDA tests where there is no device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and PyTorch finds none here")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End Ray's cluster after its tests, not at the end of the run."""
    here, then = (one and sharing.unit_of(one.nodeid) for one in (item, nextitem))
    try:
        yield
    finally:
        if here == sharing.RAY != then:
            ray_clusters.end_shared_cluster()


@pytest.fixture(autouse=True)
def cold_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked `cold` start processes without a zygote."""
    with zygote.cold() if "cold" in request.keywords else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Each test has random numbers of its own, whichever tests ran before it."""
    seed = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(seed)
    random.seed(seed)


@pytest.fixture(autouse=True)
def handles_ctrl_c() -> Iterator[None]:
    """A test that leaves another handler of Ctrl-C fails, not a later one in its process."""
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert after is before


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    """The package's logger; a command that a test runs in this process changes it until then."""
    logger = logging.getLogger("nanovllm")
    handlers, level, propagate = [*logger.handlers], logger.level, logger.propagate
    yield logger
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|eos|>", "<|im_start|>"]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[1],
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_model(
    path: Path, *, family: str = "Qwen3", seed: int = 0, shards: bool = False, **overrides: Any
) -> Path:
    """Save a random model with its tokenizer, as transformers itself saves it."""
    torch.manual_seed(seed)
    experts = EXPERTS if family == "Qwen3Moe" else {}
    model_class = getattr(transformers, f"{family}ForCausalLM")
    config = model_class.config_class(**SHAPE | experts | overrides)
    model = model_class(config).to(torch.float32)
    for name, param in model.named_parameters():
        if param.dim() > 1:  # larger than training would start with: peaked, varied outputs
            param.data.normal_(0.0, 0.15)
        elif name.endswith("bias"):
            param.data.normal_(0.0, 0.5)
        else:
            param.data.uniform_(0.5, 1.5)
    model.save_pretrained(path, max_shard_size="100KB" if shards else "1GB")
    byte_tokenizer().save_pretrained(path)
    return path


def edit_config(path: Path, **changes: Any) -> None:
    """Change fields of `config.json`; None deletes one."""
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


class LogitRecorder:
    """Notes what an engine chooses each token from: logits by sequence and its length then."""

    def __init__(self, llm: LLM) -> None:
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        self._keys: list[tuple[int, int]] = []
        runner, shard = llm.model_runner, llm.model_runner.shard
        draw_step, draw = runner.draw, shard.draw

        def recording_step(begun: Begun) -> Any:
            draws = zip(begun.batch.sampling_seqs, begun.batch.offsets, strict=True)
            self._keys = [(seq.seq_id, seq.num_tokens + offset) for seq, offset in draws]
            return draw_step(begun)

        def recording_draw(computed: Computed, inputs: DrawInputs) -> Any:
            logits = computed.logits[: len(self._keys)]
            self.logits |= zip(self._keys, logits.float().cpu(), strict=True)
            return draw(computed, inputs)

        runner.draw = recording_step  # type: ignore[method-assign]
        shard.draw = recording_draw  # type: ignore[method-assign]

    def of(self, output: RequestOutput) -> torch.Tensor:
        """Logits [tokens, vocab] of a finished request's tokens."""
        start = output["num_prompt_tokens"]
        lengths = range(start, start + len(output["token_ids"]))
        return torch.stack([self.logits[output["request_id"], length] for length in lengths])


class SamplerInputs(NamedTuple):
    """What the sampler takes beside logits."""

    temperatures: torch.Tensor | None
    keys: torch.Tensor | None
    filters: list[Filters]


def sampler_inputs(
    seqs: list[Sequence], vocab_size: int, device: torch.device | None = None, **drafts: Any
) -> SamplerInputs:
    """The sampler's inputs for the next tokens of `seqs`, as the engine makes and uploads them."""
    device = device or torch.device("cpu")
    for seq in seqs:
        if seq.params.penalizes and seq.parts.counts is None:
            seq.parts.counts = TokenCounts()
    host = draw_inputs(seqs, vocab_size, device.type, **drafts)
    filters = upload_all(host.filters, device)
    if host.temperatures is None or host.keys is None:
        return SamplerInputs(None, None, filters)
    return SamplerInputs(upload(host.temperatures, device), upload(host.keys, device), filters)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small lose by a second thread, the more so where the cores are shared."""
    yield from with_threads(1)


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """PyTorch and the kernels divide their work, also in a worker that has one thread."""
    yield from with_threads(2)


def with_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


def need_gpus(number: int) -> None:
    """Skip a test of more GPUs than there are."""
    if (there := torch.cuda.device_count()) < number:
        pytest.skip(f"needs {number} GPUs, and PyTorch finds {there}")


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let in all that has room right now, so that there are preemptions to be tested."""
    monkeypatch.setattr("nanovllm.engine.schedule.forecast.WORTHWHILE", {True: 0, False: 0})


def kernel_settings(max_examples: int) -> settings:
    """For tests of Triton's kernels: interpreted, a shape takes little time; compiled, a second.

    Each commit tries others.
    """
    fewer = max(5, max_examples // 8) if torch.cuda.is_available() else examples(max_examples)
    return settings(max_examples=fewer, deadline=None)


@pytest.fixture(scope="session")
def kernel_device() -> str:
    """Where tensors of Triton's kernels stand: on the CPU Triton interprets what it compiles."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return "cuda"
    import interpreter

    interpreter.patch_interpreter()
    return "cpu"


@pytest.fixture(scope="session")
def compiler() -> None:
    """What needs the CPU's compiled kernels is skipped where nothing compiles them."""
    try:
        library()
    except RuntimeError as error:
        pytest.skip(str(error))


class Products(NamedTuple):
    """The types of matrices that each kind of product is used for; PyTorch multiplies the rest."""

    tiled: frozenset[torch.dtype] = frozenset()
    packed: frozenset[torch.dtype] = frozenset()

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Multiply in this way."""
        monkeypatch.setattr(processor, "tiled_types", lambda: self.tiled)
        monkeypatch.setattr(packed_linear, "packed_types", lambda: self.packed)


PRODUCTS = {
    "tiled": Products(tiled=frozenset((torch.float32, torch.bfloat16))),
    "packed": Products(packed=packed_types()),
    "plain": Products(),
}


@pytest.fixture(params=PRODUCTS)
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Products:
    """Plain matrices are multiplied in this way, where the kernels of this process can do so.

    Each way works on any processor, except that oneDNN packs only the types that it is good at.
    """
    made: Products = PRODUCTS[request.param]
    if made.tiled:
        request.getfixturevalue("compiler")
    made.use(monkeypatch)
    return made


@pytest.fixture
def plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain matrices stay as they are stored, as on a GPU."""
    PRODUCTS["plain"].use(monkeypatch)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The standard random model: grouped queries, untied, head_dim * heads == hidden."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def adder_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of the embedded model, whose chat template also shows tools; keys are k1 and k2."""
    from servers import serving

    from nanovllm.embedded import EMBEDDED_MODEL

    path = tmp_path_factory.mktemp("adder") / "model"
    shutil.copytree(EMBEDDED_MODEL, path, ignore=shutil.ignore_patterns("*.py*", "head"))
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.tool_calls or '' }}"
        "<|im_end|>\n{% endfor %}{% if tools %}<tool_call>{{ tools }}{% endif %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    keys = ("--api-key", "k1", "--api-key", "k2")
    limits = ("--max-model-len", "512", "--max-num-seqs", "8", "--max-responses", "4")
    with serving(path / "log", str(path), "--served-model-name", "adder", *keys, *limits) as server:
        yield server


@pytest.fixture
def copy_of_model(model_dir: Path, tmp_path: Path) -> Callable[[], Path]:
    """A private copy of the standard model, for tests that break it."""

    def copy() -> Path:
        target = tmp_path / "copy"
        target.mkdir()
        for file in model_dir.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        return target

    return copy


@contextlib.contextmanager
def ctrl_c_before(line: int | None, code: CodeType) -> Iterator[None]:
    """Interrupt what runs inside before a line of a function's code, if it gets there."""

    def strike(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code is code and event == "line" and frame.f_lineno == line:
            raise KeyboardInterrupt
        return strike

    before = sys.gettrace()
    sys.settrace(strike)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        sys.settrace(before)
