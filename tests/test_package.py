"""The package as a whole: what importing it costs, who may import whom, and what is shipped."""

import ast
import functools
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import zygote
from test_docs import tool
from waiting import LIMIT

import nanovllm

code_lines = tool("write_architecture").code_lines
PACKAGE = Path(nanovllm.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
HEAVY = (
    "torch", "transformers", "triton", "tokenizers", "safetensors", "numpy", "huggingface_hub",
    "llguidance",
)  # fmt: skip
SCHEDULER_SIDE = (
    "engine.schedule.scheduler", "engine.cache.block_manager", "engine.cache.prefixes",
    "engine.schedule.forecast", "engine.schedule.sequence", "engine.schedule.batch",
    "engine.schedule.drafting", "engine.engine_config", "drafting.host_drafting",
    "drafting.table_drafting",
)  # fmt: skip

# What one `generate` with plain PyTorch loads, at most: modules, and lines of code in them.
MOST_MODULES, MOST_LINES = 110, 8_000

# Rooms of features: the core runs without them.
FEATURES = (
    "drafting", "structured", "adapters", "weights", "vectors", "beams", "chat", "openai", "batch",
    "server", "bench", "command", "ray", "quantize", "from_vllm",
)  # fmt: skip

# What an option, a request, another device or another kind of model is the first to load.
NEEDED_ELSEWHERE = (
    "beam_search_params", "listed_values", "llm_parts", "lora_request", "metrics", "option_pairs",
    "pooling_params", "prompt_dicts",
    "speculative_config", "structured_outputs", "exports", "output_kind", "token_logprobs",
    "utils.other_names",
    "utils.changes", "utils.list_checks",
    "engine.requests.extras",
    "engine.requests.logprobs", "engine.requests.parts", "engine.requests.processors",
    "engine.requests.progress", "engine.requests.sample_limit", "engine.requests.statistics",
    "engine.requests.stop_text",
    "engine.requests.token_counts",
    "engine.run.profile", "engine.run.graphs", "engine.run.logprobs", "engine.run.narrowing",
    "engine.run.reports", "engine.run.processed_logits", "engine.run.upload_stream",
    "engine.ranks", "engine.remote",
    "engine.start.warm_up", "engine.start.device_memory", "engine.cache.codes",
    "engine.cache.divide",
    "engine.schedule.growth", "engine.schedule.fairness", "engine.cache.windows",
    "engine.cache.state_pool", "engine.cache.state_slots", "engine.cache.caches_with_states",
    "engine.cache.pools_with_states",
)  # fmt: skip

# Words of features stand in few lines of the rooms that run every request: whole words and parts of
# names. "Drafting" is the name of a seam.
FEATURE_WORD = re.compile(
    r"(?<![a-z])(draft|adapter|mask|pool|window|state|vector|beam|tool)(s|ed)?(?![a-z])", re.I
)
MOST_FEATURE_WORDS = 0.05

# Imports run down these floors, or stay on one; `nanovllm` itself is below all of them.
FLOORS = (
    ("utils",),
    ("config", "sampling_params", "structured_outputs", "speculative_config", "from_vllm.names",
     "output_kind", "token_logprobs", "engine_options",
     "beam_search_params", "pooling_params", "lora_request",
     "prompts", "outputs", "metrics", "embedded", "option_names", "listed_values",
     "option_pairs", "prompt_dicts"),
    ("kernels",), ("formats",), ("layers",), ("models",), ("engine",),
    ("drafting", "structured", "adapters", "weights", "vectors", "beams", "quantize"), ("chat",),
    ("features", "llm", "llm_parts", "async_llm", "engine_main", "from_vllm"), ("openai",),
    ("batch",), ("server",), ("bench",), ("command",), ("ray",),
    ("exports",),
)  # fmt: skip
FLOOR_OF = {f"nanovllm.{room}": floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# What a module must not import beside that, by the beginning of its name.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "nanovllm.utils": HEAVY,
    "nanovllm.config": HEAVY,
    "nanovllm.sampling_params": HEAVY,
    "nanovllm.structured_outputs": HEAVY,
    "nanovllm.beam_search_params": HEAVY,
    "nanovllm.pooling_params": HEAVY,
    "nanovllm.beams.search": HEAVY,
    "nanovllm.speculative_config": HEAVY,
    "nanovllm.prompts": HEAVY,
    "nanovllm.outputs": HEAVY,
    "nanovllm.metrics": HEAVY,
    "nanovllm.from_vllm.names": HEAVY,
    "nanovllm.embedded": HEAVY,
    "nanovllm.option_names": HEAVY,
    "nanovllm.kernels": ("nanovllm.utils", "nanovllm.config", "transformers", "numpy"),
    "nanovllm.layers": ("nanovllm.config", "transformers"),
    "nanovllm.models": ("transformers",),
    "nanovllm.models.config": HEAVY,
    "nanovllm.models.shapes": HEAVY,
    **{
        f"nanovllm.models.{name}": (*HEAVY, "nanovllm.layers")
        for name in ("fields", "windows", "rope", "checkpoint")
    },
    "nanovllm.models.family": HEAVY,
    **{
        f"nanovllm.{name}": (
            *HEAVY, "nanovllm.engine.run", "nanovllm.models",
            "nanovllm.layers", "nanovllm.kernels", "nanovllm.engine.requests",
        )
        for name in SCHEDULER_SIDE
    },
    "nanovllm.quantize.options": HEAVY,
    "nanovllm.bench.shapes": HEAVY,
    "nanovllm.bench.workload": HEAVY,
    "nanovllm.bench.serve": (*HEAVY, "nanovllm.engine", "nanovllm.llm"),
    "nanovllm.command": ("nanovllm.engine.llm_engine", "transformers"),
}  # fmt: skip


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `statement`."""
    script = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    with zygote.cold():
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            timeout=LIMIT,
        )
    assert done.stderr == ""
    return set(done.stdout.split())


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(file: Path) -> list[str]:
    """Every module that a file imports, at its top or inside functions."""
    package = module_name(file) if file.name == "__init__.py" else module_name(file.parent)
    names = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names


def is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def test_importing_the_package_does_not_load_torch() -> None:
    """That would take seconds, for `SamplingParams` or for the `--help` of a script."""
    loaded = loaded_by("import nanovllm\nnanovllm.SamplingParams(temperature=0)")
    assert loaded & {*HEAVY, "tqdm"} == set()
    assert "nanovllm" in loaded


def test_reading_configs_does_not_load_torch() -> None:
    """With the families of all architectures."""
    statement = """
from nanovllm.models.family import MODELS
from nanovllm.models.config import ModelConfig
needed = {  # where two ranks cannot split the defaults, or one is missing
    "FalconForCausalLM": {"hidden_size": 512, "num_attention_heads": 8},
    "Glm4MoeForCausalLM": {"head_dim": 128},  # half of the default, 42, is odd
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
}
for name in MODELS:
    file = {"architectures": [name], **needed.get(name, {})}
    ModelConfig.parse(file).check_parallel_size(2)
"""
    assert loaded_by(statement) & set(HEAVY) == set()


def test_the_embedded_models_path_does_not_load_torch() -> None:
    loaded = loaded_by("from nanovllm.embedded import EMBEDDED_MODEL")
    assert loaded & set(HEAVY) == set()


ALONE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("nanovllm.") and name.split(".")[1] in ROOMS:
            raise ImportError(f"the core imports {name}")
sys.meta_path.insert(0, Refuse())
from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL
with LLM(EMBEDDED_MODEL, device="cpu", attention_backend="torch", cpu_kvcache_gib=0.01) as llm:
    params = SamplingParams(max_tokens=4)
    (output,) = llm.generate("1+1=", params, use_tqdm=False)
    assert len(output.token_ids) > 0
    assert "".join(event.text for event in llm.stream("1+1=", params)) == output.text
    modules = [name for name in sys.modules if name.startswith("nanovllm")]
    shard = llm.model_runner.shard  # decode graphs run where there are no masked draws
    shard.graphs = shard.decode_graphs(2)
    assert llm.generate("1+1=", params, use_tqdm=False)[0].text == output.text
print("modules:", *modules)
"""


def test_the_core_stands_alone() -> None:
    """`generate` and `stream` run where every feature's room is refused, and load little."""
    with zygote.cold():
        done = subprocess.run(
            [sys.executable, "-c", f"ROOMS = {FEATURES}\n{ALONE}"],
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    assert done.returncode == 0, done.stderr
    _, _, listed = done.stdout.partition("modules: ")
    modules = listed.split()
    assert 80 < len(modules) <= MOST_MODULES
    files = {module_name(file): file for file in FILES}
    unused = [f"nanovllm.{name}" for name in NEEDED_ELSEWHERE]
    assert [name for name in modules if any(is_under(name, other) for other in unused)] == []
    lines = sum(code_lines(files[name].read_text(encoding="utf-8")) for name in modules)
    assert 6_000 < lines <= MOST_LINES


@pytest.mark.parametrize("name", SCHEDULER_SIDE)
def test_scheduler_side_does_not_load_torch(name: str) -> None:
    """Nor does anything that it imports: the scheduler can be simulated without tensors."""
    assert loaded_by(f"import nanovllm.{name}") & set(HEAVY) == set()


def test_scheduler_side_runs_without_torch() -> None:
    """Only a run shows imports inside functions."""
    statement = """
from nanovllm.config import Config
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.schedule.scheduler import Scheduler
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
config = Config("m", kvcache_block_size=2, overlap=False, max_num_batched_tokens=64, max_num_seqs=4)
scheduler = Scheduler(EngineConfig.settle(config, num_kvcache_blocks=4, max_model_len=8))
for prompt in ([1, 2, 3], [1, 2, 3], [4]):
    scheduler.add(Sequence(prompt, SamplingParams(max_tokens=4), max_model_len=8))
while not scheduler.is_finished():
    batch = scheduler.schedule()
    scheduler.postprocess(batch, [5] * len(batch.sampling_seqs))
"""
    assert loaded_by(statement) & set(HEAVY) == set()


def floor_of(name: str) -> int:
    """The floor of a module; -1 for the package itself, which all may import."""
    parts = name.split(".")
    within = FLOOR_OF.get(".".join(parts[:3]))
    return FLOOR_OF.get(".".join(parts[:2]), -1) if within is None else within


def import_graph() -> dict[str, set[str]]:
    """The modules of the package that each one imports: at its top, in functions, for types."""
    names = {module_name(file) for file in FILES}
    graph = {}
    for file in FILES:
        found = {name for name in imports(file) if is_under(name, "nanovllm")}
        # `from module import name` is listed as module.name, which may be a module itself.
        modules = {name if name in names else name.rpartition(".")[0] for name in found}
        graph[module_name(file)] = modules & names - {module_name(file)}
    return graph


def import_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other, by what each one reaches."""
    reached = {name: set(found) for name, found in graph.items()}
    changed = True
    while changed:
        changed = False
        for found in reached.values():
            more = found.union(*(reached[name] for name in found))
            changed |= more != found
            found |= more
    circles = {
        tuple(sorted(other for other in found if name in reached[other]))
        for name, found in reached.items()
        if name in found
    }
    return [list(circle) for circle in sorted(circles)]


def test_imports_run_down_the_floors() -> None:
    upward = [
        f"{name} imports {other}"
        for name, found in import_graph().items()
        for other in found
        if floor_of(other) > floor_of(name) >= 0
    ]
    assert upward == []


def test_the_core_speaks_of_no_features() -> None:
    """Whole words and parts of names, in the files that schedule and run steps."""
    engine = PACKAGE / "engine"
    files = [*(engine / "schedule").glob("*.py"), *(engine / "run").glob("*.py")]
    lines = [
        line
        for file in (*files, engine / "llm_engine.py")
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    named = [line for line in lines if FEATURE_WORD.search(re.sub(r"(?=[A-Z][a-z])", "_", line))]
    assert len(lines) > 2000
    assert len(named) <= MOST_FEATURE_WORDS * len(lines)


def test_every_module_is_on_a_floor() -> None:
    outside = {"nanovllm", "nanovllm.__main__"}
    lost = [n for n in map(module_name, FILES) if floor_of(n) < 0 and n not in outside]
    assert lost == []


def test_no_import_circles() -> None:
    assert import_circles(import_graph()) == []


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert import_circles(graph) == [["b", "c"]]


def test_no_module_imports_what_is_forbidden_to_it() -> None:
    bad = [
        f"{name} imports {imported}"
        for file in FILES
        for name in [module_name(file)]
        for owner, prefixes in FORBIDDEN.items()
        if is_under(name, owner)
        for imported in imports(file)
        for prefix in prefixes
        if is_under(imported, prefix)
    ]
    assert bad == []


def test_only_the_ray_room_imports_ray() -> None:
    """Neither the engine nor the command needs it."""
    users = {
        module_name(file)
        for file in FILES
        for name in imports(file)
        if any(is_under(name, other) for other in ("ray", "pyarrow", "nanovllm.ray"))
    }
    assert "nanovllm.ray.serve" in users
    assert [name for name in users if not is_under(name, "nanovllm.ray")] == []


def test_batch_jobs_of_ray_need_no_web_server() -> None:
    """Nor does a server need Arrow; and the package itself loads none of them."""
    pytest.importorskip("ray.data")
    assert loaded_by("import nanovllm.ray") & {*HEAVY, "ray", "starlette", "pyarrow"} == set()
    servers = {"starlette", "uvicorn", "fastapi", "prometheus_client"}
    assert loaded_by("from nanovllm.ray import answer") & servers == set()


def test_servers_of_ray_need_no_arrow() -> None:
    pytest.importorskip("ray.serve")
    script = "import sys; sys.modules['pyarrow'] = None; from nanovllm.ray import serving_app"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=LIMIT)


def test_the_rules_name_existing_modules() -> None:
    """The rule of a renamed module would check nothing."""
    names = {module_name(file) for file in FILES}
    ours = {prefix for rule in FORBIDDEN.values() for prefix in rule if "nanovllm" in prefix}
    rules = set(FORBIDDEN) | ours | set(FLOOR_OF)
    assert (rules | {f"nanovllm.{name}" for name in NEEDED_ELSEWHERE}) - names == set()


def test_imports_are_resolved(tmp_path: Path) -> None:
    """Relative imports, imports in functions, imports of modules."""
    backend = PACKAGE / "layers" / "backend.py"
    assert "nanovllm.kernels.plain.prefill_attention" in imports(backend)
    assert any(
        is_under(n, "transformers")
        for n in imports(PACKAGE / "engine" / "requests" / "tokenizer.py")
    )
    assert is_under("torch.nn", "torch")
    assert not is_under("torchvision", "torch")


def test_llm_is_importable_from_the_top() -> None:
    assert nanovllm.LLM.__module__ == "nanovllm.llm"
    assert set(nanovllm.__all__) == {
        "LLM", "AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "BeamSearchOutput",
        "BeamSearchParams", "CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput",
        "EngineArgs", "LLMEngine", "LoRARequest", "PoolingOutput", "PoolingParams",
        "PoolingRequestOutput", "PromptType", "RankError", "RequestOutput", "RequestOutputKind",
        "SamplingParams", "ScoringOutput", "ScoringRequestOutput", "StructuredOutputs",
        "StructuredOutputsParams", "TextPrompt", "TokensPrompt", "register_model",
    }  # fmt: skip
    assert all(hasattr(nanovllm, name) for name in nanovllm.__all__)
    assert {*nanovllm.__all__, "__version__"} <= set(dir(nanovllm)), "what notebooks complete"
    with pytest.raises(AttributeError, match="'nanovllm' has no attribute 'LLMs'"):
        _ = nanovllm.LLMs


def test_version_is_the_installed_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", nanovllm.__version__)
    try:
        installed = metadata.version("nanovllm")
    except metadata.PackageNotFoundError:
        pytest.skip("the package is not installed")
    assert installed == nanovllm.__version__


def test_every_folder_is_a_package() -> None:
    """Without __init__.py it would work in the checkout and be missing in the wheel."""
    folders = {file.parent for file in FILES}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_wheel_has_all_files(tmp_path: Path) -> None:
    """Among them the embedded model and the type marker."""
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    shipped = {included.distribution_path for included in builder.recurse_included_files()}
    needed = {
        str(file.relative_to(ROOT))
        for file in PACKAGE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert needed - shipped == set()
    assert {path.partition("/")[0] for path in shipped} == {"nanovllm"}


def test_git_ignores_no_file_of_the_package() -> None:
    """The build leaves out ignored files."""
    files = [str(f) for f in PACKAGE.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    try:
        done = subprocess.run(
            ["git", "check-ignore", "--no-index", "--stdin"], cwd=ROOT, input="\n".join(files),
            capture_output=True, text=True, timeout=LIMIT,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("needs git")
    if done.returncode > 1:
        pytest.skip("not a git checkout")
    assert done.stdout.split() == []


def test_no_two_test_files_share_a_name() -> None:
    """Without packages in tests/, two files of one name shadow each other."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
