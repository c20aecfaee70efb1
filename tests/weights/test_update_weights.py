"""Updates of weights: afterwards an engine answers as a fresh one with those weights does."""

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from audits import audit_scheduler
from conftest import edit_config, make_model
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import reduce_tensor

from nanovllm import LLM, RankError, SamplingParams
from nanovllm.engine.errors import NotReadyError

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = [[3, 14, 15, 92, 65], [35, 89, 79], [*range(40)]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MOE = dict(
    family="Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip
Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
TIED = ("model.embed_tokens.weight", "lm_head.weight")


def make_llm(path: Path, size: int = 1, **options: Any) -> LLM:
    defaults = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.02, max_model_len=128)
    return LLM(path, **defaults | dict(tensor_parallel_size=size) | options)


def generate(llm: LLM) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(IDS, GREEDY, use_tqdm=False)]


def answers(path: Path, size: int = 1, **options: Any) -> list[list[int]]:
    with make_llm(path, size, **options) as llm:
        return generate(llm)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Two checkpoints of each kind, with different weights."""
    home = tmp_path_factory.mktemp("models")
    kinds: dict[str, dict[str, Any]] = {
        "plain": dict(attention_bias=True),
        "tied": dict(tie_word_embeddings=True),
        "moe": MOE,
    }

    def make(kind: str, seed: int) -> Path:
        path = home / f"{kind}-{seed}"
        if not path.exists():
            make_model(path, seed=seed, **kinds[kind])
        return path

    return make


@pytest.fixture(scope="module")
def llm(models: Callable[[str, int], Path]) -> Iterator[LLM]:
    """For tests that leave the weights as they are."""
    with make_llm(models("plain", 0)) as llm:
        yield llm


def with_tensors(path: Path, target: Path, **tensors: torch.Tensor) -> Path:
    """A copy of a checkpoint with other values of some tensors."""
    shutil.copytree(path, target)
    save_file(tensors_of(path) | tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("kind", "size", "options"),
    [
        ("plain", 1, {}),
        ("plain", 2, {}),
        ("plain", 1, dict(dtype="bfloat16")),
        ("plain", 1, dict(quantization="fp8")),
        ("plain", 2, dict(quantization="int8")),
        ("plain", 1, dict(quantization="int4")),
        ("plain", 1, dict(attention_backend="torch")),
        ("tied", 1, {}),
        ("tied", 2, dict(dtype="bfloat16")),
        ("tied", 1, dict(quantization="int8")),
        ("moe", 1, dict(dtype="bfloat16")),
        ("moe", 1, dict(quantization="int8")),
        ("moe", 2, dict(enable_expert_parallel=True)),
    ],
)
def test_a_whole_update_equals_a_fresh_engine(
    kind: str, size: int, options: dict[str, Any], models: Callable[[str, int], Path]
) -> None:
    old, new = models(kind, 0), models(kind, 1)
    expected = answers(new, size, **options)
    with make_llm(old, size, **options) as llm:
        before = generate(llm)
        assert before != expected
        llm.update_weights(tensors_of(new))
        assert generate(llm) == expected
        llm.update_weights(iter(tensors_of(old).items()))
        assert generate(llm) == before


@pytest.mark.parametrize(
    ("kind", "size", "names"),
    [
        ("plain", 1, [Q]),
        ("plain", 2, [Q]),
        ("plain", 1, ["model.layers.1.self_attn.v_proj.bias", NORM]),
        ("plain", 1, ["model.layers.0.mlp.up_proj.weight", "lm_head.weight"]),
        ("tied", 1, ["lm_head.weight"]),
        ("tied", 1, ["model.embed_tokens.weight"]),
        ("moe", 2, ["model.layers.0.mlp.experts.3.down_proj.weight", NORM]),
    ],
)
def test_a_partial_update_changes_only_its_part(
    kind: str, size: int, names: list[str], models: Callable[[str, int], Path], tmp_path: Path
) -> None:
    old, other = models(kind, 0), tensors_of(models(kind, 1))
    stored = "model.embed_tokens.weight" if kind == "tied" else None
    changed = {name: other[stored or name] for name in names}
    mixed = with_tensors(old, tmp_path / "mixed", **{stored or n: t for n, t in changed.items()})
    expected = answers(mixed, size)
    with make_llm(old, size) as llm:
        assert generate(llm) != expected
        llm.update_weights(changed)
        assert generate(llm) == expected
        values = llm.get_weights(names)
        assert all(torch.equal(values[name], changed[name]) for name in names)


def test_parts_of_a_quantized_layer_are_updated_together(
    models: Callable[[str, int], Path], tmp_path: Path
) -> None:
    old, other = models("plain", 0), tensors_of(models("plain", 1))
    parts = {Q.replace("q_proj", part): other[Q.replace("q_proj", part)]
             for part in ("q_proj", "k_proj", "v_proj")}  # fmt: skip
    expected = answers(with_tensors(old, tmp_path / "mixed", **parts), quantization="int8")
    with make_llm(old, quantization="int8") as llm:
        before = generate(llm)
        with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.qkv_proj .* only together"):
            llm.update_weights([(NORM, other[NORM]), (Q, other[Q])])
        assert generate(llm) == before
        llm.update_weights(parts)
        assert generate(llm) == expected


@pytest.mark.parametrize(("kind", "size"), [("plain", 1), ("plain", 2), ("tied", 1), ("moe", 2)])
def test_weights_are_read_as_they_were_loaded(
    kind: str, size: int, models: Callable[[str, int], Path]
) -> None:
    path = models(kind, 0)
    with make_llm(path, size) as llm:
        values = llm.get_weights()
        for name, tensor in tensors_of(path).items():
            assert torch.equal(values[name], tensor), name
        assert values.keys() == tensors_of(path).keys()
        assert torch.equal(llm.get_weights(Q)[Q], tensors_of(path)[Q])


@pytest.mark.usefixtures("products")
def test_bfloat16_weights_are_read_exactly_and_replaced_in_every_layout(
    models: Callable[[str, int], Path],
) -> None:
    old, new = (tensors_of(models("plain", seed))[Q].bfloat16() for seed in (0, 1))
    with make_llm(models("plain", 0), dtype="bfloat16", enable_sleep_mode=True) as llm:
        before = generate(llm)
        found = llm.get_weights([Q, NORM])[Q]
        assert found.dtype == torch.bfloat16 and torch.equal(found, old)
        llm.update_weights({Q: new})
        assert torch.equal(llm.get_weights(Q)[Q], new)
        assert generate(llm) != before
        llm.sleep(2)
        llm.wake_up()
        assert generate(llm) == before


def test_quantized_weights_cannot_be_read(models: Callable[[str, int], Path]) -> None:
    with (
        make_llm(models("plain", 0), quantization="int8") as llm,
        pytest.raises(ValueError, match=r"q_proj.weight' is quantized"),
    ):
        llm.get_weights(Q)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([("model.nothing", torch.zeros(1))], "has no tensor 'model.nothing'"),
        ([(Q, torch.zeros(3, 64))], r"has shape \(3, 64\), the model needs \(64, 64\)"),
        ([(Q, torch.zeros(64, 64, dtype=torch.int8))], "has type int8, a model needs one of float"),
        ([Q], "must be pairs of a name and a tensor"),
        ([(Q, [1.0])], "must have tensors, or handles"),
        ([(Q, torch.zeros(64, 64, device="meta"))], "q_proj.weight' has one on the meta device"),
        ([(Q, torch.eye(64).to_sparse())], "q_proj.weight' has one of layout torch.sparse_coo"),
    ],
)
def test_bad_weights_change_nothing(weights: Any, message: str, llm: LLM) -> None:
    before = generate(llm)
    good = (NORM, torch.zeros(64))
    with pytest.raises((ValueError, TypeError), match=message):
        llm.update_weights([good, *weights])
    with pytest.raises((ValueError, TypeError), match=message):
        llm.update_weights(iter([*weights, good]))
    assert generate(llm) == before


def test_a_list_has_each_tensor_once(llm: LLM) -> None:
    """Whatever its spelling is."""
    for name in (NORM, NORM.removeprefix("model.")):
        with pytest.raises(ValueError, match="is given twice"):
            llm.update_weights([(NORM, torch.zeros(64)), (name, torch.zeros(64))])


def test_what_is_no_list_of_weights_is_refused(llm: LLM) -> None:
    before = generate(llm)
    zeros = torch.zeros(64)
    for weights in (None, 3, "weights", zeros):
        with pytest.raises(TypeError, match="weights must be a dict, or an iterable"):
            llm.update_weights(weights)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"input_layernorm.weight' is given twice"):
        llm.update_weights([(NORM, zeros), (NORM, zeros)])
    with pytest.raises(TypeError, match="names must be names of tensors, got 3"):
        llm.get_weights([3])  # type: ignore[list-item]
    assert generate(llm) == before


def test_while_an_update_is_open_others_are_refused(models: Callable[[str, int], Path]) -> None:
    """Also a second one, which would forget what the first one has changed."""
    new = tensors_of(models("plain", 1))
    with make_llm(models("plain", 0), enable_sleep_mode=True) as llm:
        before = generate(llm)
        for call in (lambda: llm.load_weights([]), llm.end_update):
            with pytest.raises(
                NotReadyError, match=r"no update is open; call begin_update\(\) first"
            ):
                call()
        llm.begin_update()
        llm.load_weights([(NORM, new[NORM])])
        for other in (
            llm.begin_update, lambda: llm.update_weights({}), llm.reload_weights, llm.sleep,
            lambda: llm.sleep(2), llm.get_weights,
        ):  # fmt: skip
            with pytest.raises(
                NotReadyError, match=r"call end_update\(\) or cancel_update\(\) first"
            ):
                other()
        with pytest.raises(NotReadyError, match=r"is open; end_update\(\) or cancel_update"):
            generate(llm)
        llm.cancel_update()
        with pytest.raises(NotReadyError, match=r"update_weights\(\), or call reload_weights\(\)"):
            generate(llm)
        llm.reload_weights()
        assert generate(llm) == before
        llm.begin_update()
        llm.cancel_update()
        assert generate(llm) == before, "nothing has changed"


def test_an_update_that_does_not_begin_leaves_the_weights(
    models: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before it has changed anything, after another update that had ended."""
    new = tensors_of(models("plain", 1))
    with make_llm(models("plain", 0)) as llm:
        llm.update_weights(new)
        before = generate(llm)
        with monkeypatch.context() as patch:
            patch.setattr(llm.parts.weights, "stop_all", lambda: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                llm.update_weights(new)
        assert generate(llm) == before


def test_requests_that_were_preempted_have_begun(models: Callable[[str, int], Path]) -> None:
    """Otherwise log-probabilities of a prompt would be of old and of new weights."""
    with make_llm(models("plain", 0), max_num_batched_tokens=16) as llm:
        llm.add_request(IDS[2], SamplingParams(prompt_logprobs=0, max_tokens=1))
        llm.step()
        llm.scheduler.restart(seq for r in llm.requests.unfinished.values() for seq in r.unfinished)
        with pytest.raises(NotReadyError, match="update_weights while 1 request is running"):
            llm.update_weights({})


def test_tied_tensors_must_be_equal(models: Callable[[str, int], Path]) -> None:
    with make_llm(models("tied", 0)) as llm:
        table = tensors_of(models("tied", 1))["model.embed_tokens.weight"]
        with pytest.raises(ValueError, match=r"lm_head.weight and .* differ"):
            llm.update_weights({"lm_head.weight": table, "model.embed_tokens.weight": table + 1})
        llm.update_weights({"lm_head.weight": table, "model.embed_tokens.weight": table.clone()})


@pytest.mark.parametrize("names", [TIED, TIED[::-1]])
@pytest.mark.parametrize(
    ("size", "options"), [(1, dict(quantization="int8")), (2, dict(dtype="bfloat16"))]
)
def test_tied_tensors_must_be_equal_also_in_parts(
    size: int, options: dict[str, Any], names: tuple[str, str], models: Callable[[str, int], Path]
) -> None:
    """Values are compared in the engine's type. What differs is the last rank's."""
    table = tensors_of(models("tied", 1))["model.embed_tokens.weight"]
    other = table.clone()
    other[-1] += 1
    with make_llm(models("tied", 0), size, **options) as llm:
        before = generate(llm)
        llm.begin_update()
        for name in (*names, names[0]):
            llm.load_weights([(name, table.double())])
        llm.end_update()
        assert generate(llm) != before
        llm.update_weights({names[0]: other})  # another update may replace both by one name
        llm.begin_update()
        llm.load_weights([(names[0], table)])
        with pytest.raises(ValueError, match=f"{names[1]} and {names[0]} differ"):
            llm.load_weights([(names[1], other)])
        with pytest.raises(NotReadyError, match=r"has failed.*update all of them"):
            generate(llm)
        llm.reload_weights()
        assert generate(llm) == before


@pytest.mark.parametrize("most", [1, 2])
def test_few_layers_are_filled_at_the_same_time(
    most: int, models: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has memory beside the model."""
    monkeypatch.setattr("nanovllm.weights.live.MOST_STAGED", most)
    new = tensors_of(models("plain", 1))
    with make_llm(models("plain", 0), dtype="bfloat16") as llm:
        staged = llm.parts.weights.held._staged
        llm.begin_update()
        for layer in range(2):
            for name in (Q, Q.replace("self_attn.q_proj", "mlp.up_proj")):
                llm.load_weights([(name := name.replace("layers.0", f"layers.{layer}"), new[name])])
                assert 0 < len(staged) <= most
        llm.end_update()
        assert not staged


@pytest.mark.parametrize("size", [1, 2])
def test_after_an_update_that_failed_all_weights_are_needed(
    size: int, models: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.weights.update.BATCH_BYTES", 1)
    new = tensors_of(models("plain", 1))
    with make_llm(models("plain", 0), size) as llm:
        before = generate(llm)

        def failing() -> Iterator[tuple[str, torch.Tensor]]:
            yield NORM, new[NORM]
            yield Q, new[Q]
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            llm.update_weights(failing())
        assert not llm.parts.weights.held._staged, "they take memory"
        for call in (
            lambda: generate(llm),
            lambda: llm.add_request([1]),
            llm.step,
            llm.get_weights,
        ):
            with pytest.raises(RuntimeError, match=r"has failed.*update all of them"):
                call()
        llm.update_weights({NORM: new[NORM]})
        with pytest.raises(RuntimeError, match="has failed"):
            generate(llm)
        llm.update_weights(new)
        assert generate(llm) == answers(models("plain", 1), size)
        llm.reload_weights()
        assert generate(llm) == before


def test_a_rank_that_dies_in_an_update_raises_rank_error(
    models: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.weights.update.BATCH_BYTES", 1)
    new = tensors_of(models("plain", 1))
    with make_llm(models("plain", 0), 2) as llm:
        (worker,) = llm.model_runner.workers._workers

        def killing() -> Iterator[tuple[str, torch.Tensor]]:
            yield NORM, new[NORM]
            worker.process.kill()
            yield Q, new[Q]

        with pytest.raises(RankError, match="rank 1 of 2 was killed"):
            llm.update_weights(killing())
        with pytest.raises(RuntimeError, match="closed"):
            generate(llm)


def test_running_requests_are_refused_or_aborted(models: Callable[[str, int], Path]) -> None:
    new = tensors_of(models("plain", 1))
    fresh = answers(models("plain", 1))
    for overlap in (False, True):
        with make_llm(models("plain", 0), max_num_seqs=1, overlap=overlap) as llm:
            running, waiting = (llm.add_request(IDS[i], GREEDY) for i in range(2))
            for _ in range(3):
                llm.step()
            with pytest.raises(RuntimeError, match=r"1 request is running.*abort"):
                llm.update_weights(new)
            with pytest.raises(ValueError, match="running must be"):
                llm.update_weights(new, running="wait")  # type: ignore[arg-type]
            llm.update_weights(new, running="abort")
            audit_scheduler(llm.scheduler)
            outputs = []
            while not llm.is_finished():
                outputs += llm.step()
            assert [output["request_id"] for output in outputs] == [running, waiting]
            assert outputs[0]["finish_reason"] == "abort" and len(outputs[0]["token_ids"]) >= 2
            assert outputs[1]["token_ids"] == fresh[1], "it had waited"


def test_a_stream_ends_when_its_request_is_aborted(models: Callable[[str, int], Path]) -> None:
    with make_llm(models("plain", 0)) as llm:
        stream = llm.stream([IDS[0]], GREEDY)
        next(stream)
        llm.update_weights({}, running="abort")
        assert [event["finish_reason"] for event in stream] == ["abort"]


def test_the_prefix_cache_is_emptied(models: Callable[[str, int], Path]) -> None:
    with make_llm(models("plain", 0), kvcache_block_size=4) as llm:

        def cached() -> int:
            (output,) = llm.generate([IDS[2]], GREEDY, use_tqdm=False)
            return int(output["num_cached_tokens"])

        assert cached() == 0 and cached() > 30
        llm.update_weights({NORM: tensors_of(models("plain", 1))[NORM]})
        assert cached() == 0 and cached() > 30
        assert llm.reset_prefix_cache() is True
        assert cached() == 0
        llm.add_request(IDS[2], GREEDY)
        llm.step()
        llm.reset_prefix_cache()
        audit_scheduler(llm.scheduler)
        while not llm.is_finished():
            llm.step()
            audit_scheduler(llm.scheduler)
        assert cached() in (0, 36)


def test_handles_are_opened(models: Callable[[str, int], Path]) -> None:
    """On the CPU the handle has the tensor itself."""
    new = {name: reduce_tensor(t) for name, t in tensors_of(models("plain", 1)).items()}
    with make_llm(models("plain", 0)) as llm:
        llm.update_weights(new)
        assert generate(llm) == answers(models("plain", 1))


def test_parameters_of_a_trainer_are_not_touched(models: Callable[[str, int], Path]) -> None:
    """They need gradients, and may be in use by autograd."""
    weight = torch.nn.Parameter(tensors_of(models("plain", 1))[Q])
    loss = (weight * weight).sum()
    with make_llm(models("plain", 0), 2) as llm:
        llm.update_weights({Q: weight})
        assert torch.equal(llm.get_weights(Q)[Q], weight.detach())
    loss.backward()
    assert weight.grad is not None


@pytest.mark.parametrize("size", [1, 2])
def test_a_function_sees_the_model_of_every_rank(
    size: int, models: Callable[[str, int], Path]
) -> None:
    def double(model: torch.nn.Module) -> float:
        norm = model.get_parameter("model.norm.weight")
        norm.mul_(2)
        return float(norm.sum())

    with make_llm(models("plain", 0), size) as llm:
        first = llm.apply_model(double)
        assert len(first) == size and llm.apply_model(double) == [2 * first[0]] * size
        with pytest.raises(TypeError, match="function of a model"):
            llm.apply_model("norm")  # type: ignore[arg-type]
        with pytest.raises(AttributeError):
            llm.apply_model(lambda model: model.nothing)


def test_quantized_checkpoints_are_updated(
    models: Callable[[str, int], Path], tmp_path: Path
) -> None:
    """In the checkpoint's own format: here FP8 with a scale for each output."""
    paths = []
    for seed in (0, 1):
        path = tmp_path / str(seed)
        shutil.copytree(models("plain", seed), path)
        quantized = {}
        for name, tensor in tensors_of(path).items():
            if name.endswith("proj.weight"):
                scale = tensor.abs().amax(1, keepdim=True) / 448
                quantized[name] = (tensor / scale).to(torch.float8_e4m3fn)
                quantized[f"{name}_scale"] = scale
            else:
                quantized[name] = tensor
        save_file(quantized, path / "model.safetensors", {"format": "pt"})
        scheme = dict(num_bits=8, type="float", strategy="channel", symmetric=True, dynamic=False)
        rounds = dict(num_bits=8, type="float", strategy="token", symmetric=True, dynamic=True)
        group = dict(targets=["Linear"], weights=scheme, input_activations=rounds)
        edit_config(path, quantization_config=dict(
            quant_method="compressed-tensors", format="float-quantized", ignore=["lm_head"],
            config_groups=dict(group_0=group), quantization_status="compressed",
        ))  # fmt: skip
        paths.append(path)
    expected = answers(paths[1])
    with make_llm(paths[0]) as llm:
        assert generate(llm) != expected
        llm.update_weights(tensors_of(paths[1]))
        assert generate(llm) == expected
