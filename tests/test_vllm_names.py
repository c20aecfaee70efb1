"""vLLM's names of options: other names of ours, values that change nothing, and clear refusals."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from nanovllm import PoolingParams, SamplingParams
from nanovllm.config import Config
from nanovllm.from_vllm.names.fields import GENERATION
from nanovllm.from_vllm.names.options import ENGINE, POOLING, SAMPLING
from nanovllm.utils.other_names import OtherName, Values

MAKERS: dict[str, tuple[Any, dict[str, OtherName]]] = {
    "engine": (lambda **given: Config(model="some/model", **given), ENGINE),
    "sampling": (SamplingParams, SAMPLING),
    "pooling": (PoolingParams, POOLING),
}
FIELDS = {"engine": Config, "sampling": SamplingParams, "pooling": PoolingParams}
ENGINE_ARGS = (Path(__file__).parent / "data" / "vllm_engine_args.txt").read_text().split()
NAMES = [(kind, name) for kind, (_, names) in MAKERS.items() for name in names]


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_an_accepted_value_changes_nothing(kind: str, name: str) -> None:
    make, names = MAKERS[kind]
    for value in names[name].accepts:
        given = value.example if isinstance(value, Values) else value
        assert make(**{name: given}) == make()


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_any_other_value_is_refused_with_a_reason(kind: str, name: str) -> None:
    """Also 1 for True, and a list for None."""
    make, names = MAKERS[kind]
    if names[name].ours is not None:
        return
    for value in (["x"], "neither", 77, -2, {"image": 1, "backend": "xgrammar"}, object()):
        if names[name].takes(value):
            assert any(isinstance(one, Values) for one in names[name].accepts)
            continue
        with pytest.raises(ValueError, match=f"^{name}=") as caught:
            make(**{name: value})
        assert str(caught.value).endswith(f": {names[name].why.replace('`', '')}")


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_a_name_is_explained_and_is_no_field(kind: str, name: str) -> None:
    fields = {field.name for field in dataclasses.fields(FIELDS[kind])}
    other = MAKERS[kind][1][name]
    assert name not in fields
    assert (other.ours in fields) != bool(other.why)


def test_a_name_has_one_reason_in_parameters_and_in_bodies() -> None:
    for name in SAMPLING.keys() & GENERATION.keys():
        assert GENERATION[name] is SAMPLING[name]
    with pytest.raises(ValueError, match="see after_tokens of StructuredOutputs"):
        SamplingParams(thinking_token_budget=5)  # type: ignore[call-arg]


def test_best_of_is_the_number_of_samples() -> None:
    """1 was accepted with any n, and n itself was not."""
    make = MAKERS["sampling"][0]
    assert make(best_of=2, n=2) == make(n=2)
    assert make(best_of=None, n=2) == make(n=2)
    for given in (dict(best_of=1, n=2), dict(n=2, best_of=3), dict(best_of=True), dict(best_of=2)):
        with pytest.raises(ValueError, match=r"^best_of=\w+: it must be n, as all samples"):
            make(**given)


def test_every_option_of_vllm_is_known() -> None:
    """An option of vLLM's `EngineArgs`, of any version, has its effect or an error that helps."""
    assert len(ENGINE_ARGS) > 270
    known = {field.name for field in dataclasses.fields(Config)}
    for name in ENGINE_ARGS:
        if name not in known and not ENGINE.get(name, OtherName()).ours:
            with pytest.raises(ValueError, match=f"^{name}=<object object at .*: .*\\w"):
                Config(model="some/model", **{name: object()})  # type: ignore[arg-type]


def test_old_names_of_speculation_say_where_it_is() -> None:
    wanted = {"speculative_model": "model", "num_speculative_tokens": "num_speculative_tokens"}
    for name, key in wanted.items():
        with pytest.raises(ValueError, match=rf'^{name}=5: speculative_config={{"{key}": ...}}$'):
            Config(model="some/model", **{name: 5})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("limit_mm_per_prompt", {"image": 0, "video": 0}, {"image": 0, "video": 1}),
        ("limit_mm_per_prompt", {"image": {"count": 0}}, {"image": {}}),
        ("max_logprobs", 100, True),
        ("max_logprobs", -1, -2),
        ("swap_space", 4, -1),
        ("mm_processor_cache_gb", 4.0, "4"),
        ("language_model_only", False, None),
        ("structured_outputs_config", {"backend": "auto", "disable_any_whitespace": False},
         {"disable_any_whitespace": True}),
        ("master_port", 29501, 29502),
        ("logits_processors", None, ["a.B"]),
    ],
)  # fmt: skip
def test_defaults_of_vllm_may_be_given(name: str, value: Any, other: Any) -> None:
    make = MAKERS["engine"][0]
    assert make(**{name: value}) == make()
    with pytest.raises(ValueError, match=f"^{name}="):
        make(**{name: other})


@pytest.mark.parametrize(
    ("name", "ours", "value"),
    [
        ("policy", "scheduling_policy", "fcfs"),
        ("block_size", "kvcache_block_size", 32),
        ("num_gpu_blocks_override", "num_kvcache_blocks", 9),
        ("async_scheduling", "overlap", False),
    ],
)
def test_another_name_of_an_option_sets_it(name: str, ours: str, value: Any) -> None:
    """Both at once are an error; a bad value is blamed on our name."""
    make = MAKERS["engine"][0]
    assert make(**{name: value}) == make(**{ours: value})
    for given in ({name: value, ours: value}, {ours: value, name: value}):
        with pytest.raises(TypeError, match=f"^{name} is another name of {ours}; give one of them"):
            make(**given)
    with pytest.raises((TypeError, ValueError), match=f"^{ours} must be "):
        make(**{name: "x"})


def test_true_is_not_taken_for_1() -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_size=True: see tensor_parallel_size"):
        Config(model="some/model", pipeline_parallel_size=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tempreture", "temperature"), ("max_token", "max_tokens"),
        ("max_new_tokens", "max_tokens"), ("temp", "temperature"),
        ("freq_penalty", "frequency_penalty"), ("max_output_tokens", "max_tokens"),
        ("bad_word", "bad_words"), ("best_off", "best_of"),
    ],
)  # fmt: skip
def test_a_misspelled_parameter_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(TypeError) as caught:
        SamplingParams(**{name: 1})
    assert str(caught.value) == (f"unknown sampling parameter {name!r}; did you mean {nearest!r}?")


@pytest.mark.parametrize(
    "name", ["penalty", "x", "p", "tokens_per_second", "lora_request", "stop_strings", "top_7"]
)
def test_no_parameter_is_suggested_that_is_not_likely_meant(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        SamplingParams(**{name: 1})
    assert "did you mean" not in str(caught.value)
    assert f"unknown sampling parameter {name!r}; there are temperature, " in str(caught.value)


def test_no_option_is_suggested_that_is_not_likely_meant() -> None:
    for name in (
        "enable_flashinfer",
        "max_seq_len",
        "size",
        "max",
        "num",
        "gpu",
        "kv",
    ):
        with pytest.raises(TypeError) as caught:
            Config(model="some/model", **{name: 1})  # type: ignore[arg-type]
        assert "did you mean" not in str(caught.value), name
