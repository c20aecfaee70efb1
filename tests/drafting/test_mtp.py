"""The draft head in a checkpoint: its guesses are those of its definition, outputs stay the same.

It costs more than 20 seconds: answers are computed twice.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import make_adapter
from conftest import edit_config, make_model
from drafts import drafting_of, make_eager, use_graphs
from families import SAMPLES
from families.describe import write
from mtp_heads import FILE, Definition, add_head
from quantized_checkpoints import Kind, as_weight, encode
from reference import HARD, SMALL_POOL, audit_at_rest, make_llm, make_prompts
from safetensors.torch import load_file, save_file
from test_exact_drafts import PARAMS, READERS, all_samples

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.bench.acceptance import accept_by_chance
from nanovllm.command.parser import make_parser
from nanovllm.drafting.choice import costs_of
from nanovllm.drafting.draft_model import step_bytes
from nanovllm.drafting.head_guesser import HeadGuesser
from nanovllm.drafting.mtp_head import MtpHead
from nanovllm.engine.schedule.batch import Size
from nanovllm.kernels.plain.read_table import TableState

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

HEADS = "Qwen3.5", "Qwen3-Next", "GLM-4.5", "GLM-4.7-Flash", "DeepSeek-V3"
FAMILIES = [name for name in SAMPLES if name.startswith(HEADS)]
MTP: dict[str, Any] = dict(method="mtp", num_speculative_tokens=3)
PROMPTS = make_prompts()[:20]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = [
    SamplingParams(**dict(max_tokens=20) | (PARAMS + READERS)[i % 20] | dict(seed=i))
    for i in range(len(PROMPTS))
]
REGIMES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "plain PyTorch": dict(attention_backend="torch"),
    "overlap": dict(overlap=True),
    "budget 16, blocks of 1": dict(max_num_batched_tokens=16, kvcache_block_size=1),
    "three at a time, blocks of 4, overlap": dict(
        max_num_seqs=3, overlap=True, kvcache_block_size=4
    ),
    "no prefix cache, small pool": dict(SMALL_POOL, enable_prefix_caching=False),
    "small pool, budget 16": HARD,
    "mixed, overlap, small pool, budget 16": dict(HARD, scheduling="mixed", overlap=True),
    "two ranks, small pool, budget 16": dict(HARD, tensor_parallel_size=2),
    "two ranks, overlap": dict(tensor_parallel_size=2, overlap=True),
}


@dataclass(frozen=True)
class Answers:
    """A checkpoint with a head, and what it answers without drafts."""

    path: Path
    greedy: list[Any]
    sampled: list[Any]


def answers_of(llm: LLM) -> tuple[list[Any], list[Any]]:
    return tuple(
        all_samples(llm.generate(PROMPTS, params, use_tqdm=False)) for params in (GREEDY, SAMPLED)
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Answers]:
    """Makes a model of a family, with a head that is good or bad, when it is first needed."""
    made: dict[tuple[str, bool], Answers] = {}

    def make(name: str, is_good: bool) -> Answers:
        if (name, is_good) not in made:
            path = write(tmp_path_factory.mktemp("mtp"), SAMPLES[name])
            add_head(path, is_good=is_good)
            with make_llm(path) as llm:
                made[name, is_good] = Answers(path, *answers_of(llm))
        return made[name, is_good]

    return make


class Recorder:
    """Records what a head guesses after how many tokens, of which the last one is known."""

    def __init__(self, llm: LLM) -> None:
        self.guessed: list[tuple[int, int, list[int]]] = []
        guesser: Any = llm.model_runner.shard.drafting
        self._guess = guesser.guess
        guesser.guess = self.guess

    def guess(self, table: TableState, size: Size) -> None:
        self._guess(table, size)
        for row in table.batch[: size.num_seqs].tolist():
            length = int(table.lengths[row])
            if size.num_queries > 1 and length >= 0:
                drafts = table.drafts.tokens[row, : size.num_queries - 1].tolist()
                known = [token for token in drafts if token >= 0]
                self.guessed.append((length + 1, int(table.tokens[row]), known))


CASES: list[tuple[str, bool, dict[str, Any]]] = [
    *((name, False, {}) for name in FAMILIES),
    ("Qwen3.5", True, {}),
    ("Qwen3.5", False, dict(max_num_batched_tokens=7, attention_backend="torch")),
    ("Qwen3.5", True, dict(SMALL_POOL, max_num_batched_tokens=16, num_kvcache_blocks=14)),
    ("Qwen3.5", False, dict(SMALL_POOL, max_num_batched_tokens=16, num_kvcache_blocks=14)),
    ("Qwen3.5 experts", False, dict(tensor_parallel_size=2)),
]


@pytest.mark.parametrize(("name", "is_good", "options"), CASES, ids=str)
def test_drafts_are_those_of_the_definition(
    name: str, is_good: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """Of prompts in chunks, after preemptions, and after any number of accepted drafts.

    Without cached prefixes: the last position of one may be another sequence's.
    """
    path = add_head(write(tmp_path / "model", SAMPLES[name]), is_good=is_good)
    prompts = [[7 * i % (251 - n) for i in range(n)] for n in (2, 5, 20, 33)]
    with make_eager(path, MTP, enable_prefix_caching=False, **options) as llm:
        recorder = Recorder(llm)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        if "num_kvcache_blocks" in options:
            assert llm.scheduler.num_preemptions > 0
    texts = [p + out.token_ids for p, out in zip(prompts, outputs, strict=True)]
    definition = Definition(path, tmp_path / "other")
    seen: set[int] = set()
    for length, last, drafts in recorder.guessed:
        known = [t[:length] for t in texts if len(t) >= length and t[length - 1] == last]
        expected = [definition.drafts(tokens, 3)[: len(drafts)] for tokens in known]
        assert drafts in expected
        seen |= {*drafts}
    assert len(recorder.guessed) > 20 and len(seen) > 10


@pytest.mark.sampled(share=0.1)
@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("is_good", [False, True])
@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3-Next"])
def test_outputs_are_those_without_drafts(
    name: str, is_good: bool, regime: str, models: Callable[[str, bool], Answers]
) -> None:
    """Greedy and drawn ones, of states that wrong and right drafts have gone through."""
    model = models(name, is_good)
    with make_eager(model.path, MTP, **REGIMES[regime]) as llm:
        for _ in range(2):  # then from the cache
            assert answers_of(llm) == (model.greedy, model.sampled)
            audit_at_rest(llm)
        at = drafting_of(llm).accepted_at
        assert llm.stats().drafted_tokens > 50
        if is_good:
            assert all(at) and llm.stats().accepted_tokens < llm.stats().drafted_tokens


@pytest.mark.sampled(share=0.6)
@pytest.mark.parametrize("number", [1, 2, 7])
def test_any_number_of_drafts_keeps_the_output(
    number: int, models: Callable[[str, bool], Answers]
) -> None:
    model = models("Qwen3.5", True)
    config = MTP | dict(num_speculative_tokens=number)
    with make_eager(model.path, config, attention_backend="torch") as llm:
        use_graphs(llm)
        assert answers_of(llm) == (model.greedy, model.sampled)
        assert drafting_of(llm).accepted_at[number - 1] > 0
        assert llm.model_runner.shard.caches.slots_per_sequence == 1 + number


def head_of(llm: LLM) -> MtpHead:
    guesser = llm.model_runner.shard.drafting
    assert isinstance(guesser, HeadGuesser) and isinstance(guesser.head, MtpHead)
    return guesser.head


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head guesses well."""
    path = write(tmp_path_factory.mktemp("good"), SAMPLES["Qwen3.5"])
    return add_head(path, is_good=True)


def test_the_warning_says_whether_drafts_can_pay(
    good: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """More than 100% of drafts can never be right."""
    with make_llm(good, speculative_config=MTP) as llm:
        shard: Any = llm.model_runner.shard
        step, guesser = step_bytes(shard.model_config, shard.placement), shard.drafting
        said = []
        for share in (0.3, 0.6, 0.95, 1.2):
            guesser.num_bytes = share * step
            caplog.clear()
            costs_of(guesser, shard)
            said.append(caplog.text)
    assert said[0] == "" and "drafts pay only if more than 69% of them are right" in said[1]
    for text, percent in zip(said[2:], ("95%", "120%"), strict=True):
        assert f"a step of the head reads {percent} of the bytes" in text
        assert "drafts cannot pay, even if all are right" in text and "pay only" not in text


def test_a_quantized_head_reads_fewer_bytes(good: Path) -> None:
    read = []
    for quantization in (None, "int8"):
        options: dict[str, Any] = dict(speculative_config=MTP, quantization=quantization)
        with make_llm(good, **options) as llm:
            shard: Any = llm.model_runner.shard
            read.append(shard.drafting.num_bytes)
            assert read[-1] < step_bytes(shard.model_config, shard.placement)
    assert read[1] < 0.5 * read[0]


def solve(llm: LLM, **options: Any) -> tuple[list[list[int]], float]:
    """Greedy answers, and the share of right drafts."""
    before = llm.stats()
    outputs = llm.generate(PROMPTS[:8], GREEDY, use_tqdm=False, **options)
    after = llm.stats()
    number = after.drafted_tokens - before.drafted_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    return [out.token_ids for out in outputs], accepted / max(1, number)


@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_bring_the_heads_tensors(ranks: int, good: Path) -> None:
    """They need not: a head guesses worse then, but no weight is missing."""
    with make_eager(good, MTP, tensor_parallel_size=ranks, enable_sleep_mode=True) as llm:
        answers, share = solve(llm)
        assert share > 0.3
        head = {n: t for n, t in load_file(good / FILE).items() if n.startswith("mtp.")}
        llm.update_weights({name: tensor * 0.3 - 0.1 for name, tensor in head.items()})
        assert solve(llm)[0] == answers and solve(llm)[1] < 0.1
        llm.update_weights(head)
        assert solve(llm) == (answers, share)
        name = "mtp.layers.0.self_attn.q_proj.weight"
        assert torch.equal(llm.get_weights(name)[name], head[name])
        assert not any(name.startswith("mtp.") for name in llm.weight_shapes())
        with pytest.raises(ValueError, match=r"the model has no tensor 'mtp\.fc\.bias'"):
            llm.update_weights({"mtp.fc.bias": torch.zeros(64)})
        llm.sleep(2)
        llm.wake_up(["weights"])
        llm.wake_up(["kv_cache"])
        llm.update_weights({n: t for n, t in load_file(good / FILE).items() if n not in head})
        assert solve(llm) == (answers, share)
        llm.update_weights({name: tensor * 0.3 - 0.1 for name, tensor in head.items()})
        llm.reload_weights()
        assert solve(llm) == (answers, share)


def test_without_the_method_the_heads_tensors_are_left_out(good: Path) -> None:
    with make_llm(good) as llm:
        llm.update_weights({"mtp.fc.weight": torch.zeros(64, 128)})
        assert not any("mtp" in name for name, _ in llm.model_runner.shard.model.named_modules())


def test_a_head_drafts_for_adapters(good: Path, tmp_path: Path) -> None:
    """The head reads what adapters make of the model's output; it has none itself."""
    adapter = LoRARequest("mine", str(make_adapter(good, tmp_path / "adapter")))
    options: dict[str, Any] = dict(enable_lora=True, max_lora_rank=8)
    requests = [adapter, None] * 4
    with make_llm(good, **options) as llm:
        expected, plain = solve(llm, lora_request=requests)[0], solve(llm)[0]
    with make_eager(good, MTP, **options) as llm:
        assert solve(llm, lora_request=requests)[0] == expected != plain
        assert llm.stats().accepted_tokens > 0


def test_a_cache_of_codes_is_the_heads_too(good: Path) -> None:
    with make_eager(good, MTP, kv_cache_dtype="fp8", attention_backend="torch") as llm:
        (attention,) = head_of(llm).attentions
        assert attention.kv.k_scales is not None
        assert solve(llm)[1] > 0.3


def test_the_option_quantizes_the_head(good: Path) -> None:
    with make_eager(good, MTP, quantization="int8") as llm:
        head = head_of(llm).decoder
        (block,) = head.layers
        assert head.fc.weight_format.scheme is not None
        assert block.self_attn.o_proj.weight_format.scheme is not None  # type: ignore[union-attr]
        assert solve(llm)[1] > 0.3


@pytest.mark.parametrize("excludes_fc", [True, False])
def test_rules_of_quantized_files_name_the_heads_layers(
    excludes_fc: bool, good: Path, tmp_path: Path
) -> None:
    """As in published files, which list plain layers by their names there."""
    path = Path(shutil.copytree(good, tmp_path / "fp8"))
    plain = ["lm_head", "model", *["mtp.fc"] * excludes_fc]
    edit_config(path, quantization_config=dict(
        quant_method="fp8", weight_block_size=[16, 16], activation_scheme="dynamic",
        modules_to_not_convert=plain,
    ))  # fmt: skip
    kind = Kind(as_weight("weight_scale_inv"), (16, 16), is_float=True)
    weights = load_file(path / FILE)
    for name in [n for n in weights if n.startswith("mtp.") and weights[n].dim() == 2]:
        if not (excludes_fc and "fc" in name):
            codes = kind.store(encode(weights.pop(name), kind))
            above = name.removesuffix("weight")
            weights |= {above + tensor: values for tensor, values in codes.items()}
    save_file(weights, path / FILE)
    with make_llm(good) as llm:
        expected = solve(llm)[0]
    with make_eager(path, MTP) as llm:
        head = head_of(llm).decoder
        (block,) = head.layers
        assert (head.fc.weight_format.scheme is None) == excludes_fc
        assert block.self_attn.o_proj.weight_format.scheme is not None  # type: ignore[union-attr]
        answers, share = solve(llm)
        assert answers == expected and share > 0.3


def test_random_weights_make_a_head_too(good: Path) -> None:
    with make_eager(good, MTP, load_format="dummy") as llm:
        assert solve(llm)[1] < 0.1
        llm.reload_weights()
        assert llm.stats().drafted_tokens > 0


def test_a_benchmark_accepts_its_drafts_by_chance(good: Path) -> None:
    with make_eager(good, MTP, attention_backend="torch") as llm:
        accept_by_chance(llm, 1.0, 0)
        assert solve(llm)[1] > 0.9


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(mtp_num_hidden_layers=2), "mtp_num_hidden_layers=2: a draft head of more than one"),
        (dict(mtp_num_hidden_layers=0), "mtp_num_hidden_layers=0: the model has no draft head"),
        (dict(num_nextn_predict_layers=-1), "num_nextn_predict_layers must be >= 0, got -1"),
        (dict(mtp_num_hidden_layers="1"), "mtp_num_hidden_layers must be an int"),
        (dict(mtp_use_dedicated_embeddings=True), "mtp_use_dedicated_embeddings is true"),
    ],
)
def test_a_config_without_a_head_that_is_supported_is_an_error(
    fields: dict[str, Any], message: str, good: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(good, tmp_path / "model"))
    edit_config(path, **fields)
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        make_llm(path, speculative_config=MTP)
    assert str(raised.value).startswith('speculative_config, method "mtp": ')


def test_files_without_the_heads_tensors_are_an_error(good: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(good, tmp_path / "model"))
    weights = load_file(path / FILE)
    del weights["mtp.fc.weight"]
    save_file(weights, path / FILE)
    with pytest.raises(ValueError, match=r"the files lack mtp\.fc\.weight$"):
        make_llm(path, speculative_config=MTP)
    save_file({n: t for n, t in weights.items() if not n.startswith("mtp.")}, path / FILE)
    with pytest.raises(ValueError, match=r"the files have no tensors of a draft head \(mtp\.\*\)"):
        make_llm(path, speculative_config=MTP)


@pytest.mark.parametrize("name", ["GLM-4.5", "DeepSeek-V3"])
def test_a_layer_behind_those_of_the_model_is_a_head(name: str, tmp_path: Path) -> None:
    """Updates and errors name its tensors as the files do; copies of other tensors are skipped."""
    path = add_head(write(tmp_path / "model", SAMPLES[name]), is_good=True)
    weights = load_file(path / FILE)
    head = {n: t for n, t in weights.items() if n.startswith("model.layers.3.")}
    joins = "model.layers.3.eh_proj.weight"
    with make_eager(path, MTP) as llm:
        answers, share = solve(llm)
        assert share > 0.3
        llm.update_weights({name: tensor * 0.3 - 0.1 for name, tensor in head.items()})
        assert solve(llm)[0] == answers and solve(llm)[1] < 0.1
        llm.update_weights(head)
        assert solve(llm) == (answers, share)
        assert torch.equal(llm.get_weights(joins)[joins], head[joins])
        assert not any(".layers.3." in name for name in llm.weight_shapes())
    save_file({n: t for n, t in weights.items() if n != joins}, path / FILE)
    with pytest.raises(ValueError, match=r"the files lack model\.layers\.3\.eh_proj\.weight$"):
        make_llm(path, speculative_config=MTP)
    save_file({n: t for n, t in weights.items() if n not in head}, path / FILE)
    with pytest.raises(ValueError, match=r"no tensors of a draft head \(model\.layers\.3\.\*\)"):
        make_llm(path, speculative_config=MTP)
    with make_llm(path) as llm:
        assert solve(llm)[0] == answers


def test_models_of_other_families_are_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM has no draft head; those of"):
        make_llm(path, speculative_config=MTP)
    edit_config(path, num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match=r"of Qwen3ForCausalLM .*=1\) is not supported; "):
        make_llm(path, speculative_config=MTP)


def test_the_command_and_the_server_take_the_method() -> None:
    option = '{"method": "mtp", "num_speculative_tokens": 2}'
    for command in ("serve", "generate", "bench"):
        asked = make_parser().parse_args([command, "--speculative-config", option])
        assert asked.speculative_config["method"] == "mtp"
