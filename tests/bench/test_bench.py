"""The benchmark: the roofline's counts, the drawn requests, and the command line."""

import dataclasses
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import edit_config, make_model
from quantization_variants import VARIANTS
from transformers import AutoConfig, AutoModelForCausalLM
from waiting import LIMIT

from nanovllm import LLM
from nanovllm.bench import machine, measure, roofline, trace
from nanovllm.bench.plan import make_plan
from nanovllm.bench.roofline import Machine
from nanovllm.bench.shapes import SHAPES, write_shape
from nanovllm.bench.workload import WorkloadOptions, draw_workload
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.engine.start.placement import Placement, resolve_placement
from nanovllm.formats.choice import format_of
from nanovllm.formats.format import WeightFormat
from nanovllm.formats.methods import choose_quantization
from nanovllm.formats.scheme import INT8
from nanovllm.kernels.kv_layer import CODES, head_bytes
from nanovllm.kernels.operands.routing import Routing
from nanovllm.layers.ranks import ALONE
from nanovllm.models import model_size
from nanovllm.models.config import ModelConfig
from nanovllm.models.experts import ExpertsConfig, SparseConfig
from nanovllm.models.model_size import WeightBytes

BENCH = Path(__file__).parents[2] / "bench.py"
H200 = Machine(bytes_per_second=4.3e12, flops_per_second=790e12)


def load_bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench"] = module  # dataclasses look up their module
    sys.path.insert(0, str(BENCH.parent))  # as when the script is run
    spec.loader.exec_module(module)
    return module


bench = load_bench()


def shape(name: str, tmp_path: Path) -> ModelConfig:
    write_shape(name, tmp_path)
    return ModelConfig.from_dir(tmp_path)


def draw(vocab_size: int = 151_936, **lengths: int) -> tuple[list[list[int]], list[int]]:
    workload = draw_workload(WorkloadOptions(**lengths), vocab_size)
    return workload.prompts, workload.output_lens


def run_cli(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH), *options], capture_output=True, text=True, timeout=LIMIT
    )


def speculate(method: str, model: str, **keys: Any) -> str:
    return f"--speculative-config={json.dumps(dict(method=method, model=model, **keys))}"


PLAIN = WeightBytes(itemsize=2)


def in_16_bits(head_dim: int) -> int:
    return 2 * head_dim


class TestCounts:
    """A model small enough to count by hand."""

    config = ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=10, hidden_size=4, intermediate_size=6,
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=2,
        rms_norm_eps=1e-6, max_position_embeddings=64, tie_word_embeddings=True,
        rope_parameters={}, dtype="bfloat16", eos_token_ids=frozenset(), qk_norm=True,
        qkv_bias=False, o_bias=False, mlp_bias=False, sliding_windows=(None,) * 3,
        rotated_layers=(True,) * 3,
    )  # fmt: skip

    def test_parameters_are_counted_by_part(self) -> None:
        # qkv 4 x (4 + 2 + 2), o 4 x 4, gate, up and down 4 x 6 each
        assert model_size.decoder_params(self.config) == 3 * (32 + 16 + 72)
        assert model_size.head_params(self.config) == 40
        # one table; two norms of 4 and two of 2 in each layer; the last norm
        assert model_size.num_params(self.config) == 360 + 40 + 3 * (8 + 4) + 4

    def test_bytes_count_weights_and_kv(self) -> None:
        assert model_size.step_weight_bytes(self.config, PLAIN, rows=1) == 2 * (360 + 40)
        # K and V of one head of two, in three layers, two bytes each
        assert model_size.head_bytes(self.config, PLAIN) == 2 * 40
        assert model_size.model_bytes(self.config, PLAIN) == 2 * model_size.num_params(self.config)
        assert roofline.kv_bytes_per_token(self.config, in_16_bits) == 2 * 3 * 1 * 2 * 2
        assert [head_bytes(128, x) for x in (torch.float32, CODES)] == [512, 128 + 2]

    def test_prefill_flops(self) -> None:
        # Of the last layer two tokens need no more than keys and values, each 4 x 2.
        linear = 2 * (360 * (3 + 1) - 2 * (32 + 16 + 72 - 2 * 4 * 2))
        head = 2 * 40 * 2  # the last row of each prompt
        pairs = 2 * ((1 + 2 + 3) + 1) + (3 + 1)  # two layers, and the last one's last rows
        attention = pairs * 2 * (2 * 2 + 2 * 2)  # heads, q @ k and p @ v
        assert roofline.prefill_flops(self.config, [3, 1]) == linear + head + attention

    def test_decode_steps_follow_from_output_lengths(self) -> None:
        # The first token of each comes from its prefill.
        assert roofline.decode_batches([4, 1, 2]) == [2, 1, 1]
        assert roofline.decode_batches([1]) == []
        # Three steps attend to 6, 7 and 8 tokens; none; one attends to 4.
        read = roofline.decode_kv_bytes(self.config, in_16_bits, [5, 9, 3], [4, 1, 2])
        assert read == 24 * (6 + 7 + 8 + 4)

    def test_only_windows_are_read(self) -> None:
        """One of three layers sees 7 tokens, another one 2."""
        config = dataclasses.replace(self.config, sliding_windows=(None, 7, 2))
        read = roofline.decode_kv_bytes(config, in_16_bits, [5, 9, 3], [4, 1, 2])
        assert read == 8 * ((6 + 7 + 8 + 4) + (6 + 7 + 7 + 4) + 4 * 2)
        pairs = (1 + 2 + 3 + 4) + (1 + 2 + 3 + 4) + 2
        linear = 2 * (360 * 4 - 3 * 104) + 2 * 40
        assert roofline.prefill_flops(config, [4]) == linear + pairs * 2 * (2 * 2 + 2 * 2)

    @pytest.mark.parametrize(
        ("machine", "gemm"),
        [
            (Machine(1.0, 1e12), 3 * 800.0),  # three steps read 800 bytes each
            (Machine(1e12, 1.0), 800.0 * (2 + 1 + 1)),  # each row of a step is 2 x 400 FLOPs
            (Machine(1.0, 0.75), 3200 / 1.5 + 2 * 3200 / 3),  # one step each way
        ],
    )
    def test_a_decode_step_is_bound_by_bytes_or_by_flops(
        self, machine: Machine, gemm: float
    ) -> None:
        floor = roofline.floor(self.config, PLAIN, [5, 9, 3], [4, 1, 2], machine, in_16_bits)
        assert floor.decode_gemm_seconds == pytest.approx(gemm)

    def test_the_floor_is_the_sum_of_its_parts(self) -> None:
        slow = Machine(bytes_per_second=10.0, flops_per_second=5.0)
        floor = roofline.floor(self.config, PLAIN, [3, 1], [2, 1], slow, lambda dim: 4 * dim)
        assert floor.decode_kv_seconds == 4 * 48 / 10, "a key has 8 bytes, two weights 4"
        assert floor.prefill_seconds == roofline.prefill_flops(self.config, [3, 1]) / 5
        assert floor.seconds == pytest.approx(
            floor.prefill_seconds + floor.decode_gemm_seconds + floor.decode_kv_seconds
        )

    def test_a_short_prefill_still_reads_the_weights(self) -> None:
        floor = roofline.floor(self.config, PLAIN, [1], [1], Machine(1.0, 1e12), in_16_bits)
        assert floor.prefill_seconds == 800


class TestExperts:
    """The same model, with two dense layers and one of five experts, of which a token uses two."""

    config = SparseConfig(
        **{field.name: getattr(TestCounts.config, field.name)
           for field in dataclasses.fields(ModelConfig)},
        experts=ExpertsConfig(5, intermediate_size=3, routing=Routing(per_token=2, normalized=True),
                              layers=frozenset({1})),
    )  # fmt: skip
    attention, dense, expert, router = 48, 72, 3 * 4 * 3, 4 * 5

    def test_parameters_are_counted_by_part(self) -> None:
        others = 3 * self.attention + 2 * self.dense + self.router
        assert model_size.decoder_params(self.config) == others + 2 * self.expert
        assert model_size.num_params(self.config) == others + 5 * self.expert + 40 + 3 * 12 + 4

    def test_only_used_experts_are_read(self) -> None:
        """One row uses two of five; three rows miss a given one in 0.6 x 0.6 x 0.6 of cases."""
        rest = 3 * self.attention + 2 * self.dense + self.router + 40
        for rows, touched in ((1, 2.0), (3, 5 * (1 - 0.6**3)), (1000, 5.0)):
            expected = 2 * (rest + touched * self.expert)
            assert model_size.step_weight_bytes(self.config, PLAIN, rows) == pytest.approx(expected)
        # Two steps of decode: with two rows, and with one.
        floor = roofline.floor(self.config, PLAIN, [5, 9], [3, 2], Machine(1.0, 1e12), in_16_bits)
        touched = 2.0 + 5 * (1 - 0.6**2)
        expected = 2 * (2 * rest + touched * self.expert)
        assert floor.decode_gemm_seconds == pytest.approx(expected)

    def test_three_of_thirty_billion_are_active(self, tmp_path: Path) -> None:
        config = shape("qwen3-30b-a3b", tmp_path)
        active = model_size.decoder_params(config) + model_size.head_params(config)
        assert model_size.num_params(config) == 30_532_122_624
        assert active == pytest.approx(3.04e9, rel=0.01)  # 3.35 with the embedding, as published


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_params_are_those_of_the_real_model(name: str, bias: bool, tmp_path: Path) -> None:
    write_shape(name, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_bias": bias}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    params = sum(param.numel() for param in model.parameters())
    assert model_size.num_params(ModelConfig.from_dir(tmp_path)) == params


class TestWorkload:
    def test_the_default_workload_is_nano_vllms(self) -> None:
        """The same draws in the same order, so that figures can be compared."""
        random.seed(0)
        theirs = [
            [random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)
        ]
        their_lens = [random.randint(100, 1024) for _ in range(256)]
        assert draw() == (theirs, their_lens)
        assert sum(map(len, theirs)) == 142_827 and sum(their_lens) == 133_966

    def test_options_bound_lengths_and_the_vocabulary_bounds_tokens(self) -> None:
        prompts, output_lens = draw(
            50, num_seqs=64, min_input_len=3, max_input_len=5, min_output_len=2, max_output_len=4,
        )  # fmt: skip
        assert {len(prompt) for prompt in prompts} == {3, 4, 5}
        assert set(output_lens) == {2, 3, 4}
        assert {token for prompt in prompts for token in prompt} == set(range(50))

    def test_repetitive_prompts_have_the_same_lengths(self) -> None:
        lengths: dict[str, Any] = dict(num_seqs=8, min_input_len=3, max_input_len=60)
        prompts, repetitive = draw(**lengths)[0], draw(**lengths, repetitive=True)[0]
        assert [*map(len, repetitive)] == [*map(len, prompts)]
        assert any(len(prompt) > 32 for prompt in repetitive)
        for prompt in repetitive:
            assert all(prompt[i] == prompt[i - 16] for i in range(16, len(prompt)))
        assert (WorkloadOptions().temperature, WorkloadOptions(repetitive=True).temperature) == (
            0.6,
            0.0,
        )

    @pytest.mark.parametrize(
        ("name", "seconds", "tokens_per_second"),
        [("qwen3-0.6b", 3.74, 35.9e3), ("qwen3-8b", 10.65, 12.6e3)],
    )
    def test_floor_of_the_classic_workload(
        self, name: str, seconds: float, tokens_per_second: float, tmp_path: Path
    ) -> None:
        """Figures that were computed independently, for one H200, in bfloat16."""
        prompts, output_lens = draw()
        input_lens = [len(prompt) for prompt in prompts]
        floor = roofline.floor(
            shape(name, tmp_path), PLAIN, input_lens, output_lens, H200, in_16_bits
        )
        assert floor.seconds == pytest.approx(seconds, rel=0.02)
        assert sum(output_lens) / floor.seconds == pytest.approx(tokens_per_second, rel=0.02)
        if name == "qwen3-0.6b":
            assert floor.decode_kv_seconds == pytest.approx(3.22, abs=0.01)
            assert floor.prefill_seconds == pytest.approx(0.17, abs=0.01)
            assert floor.decode_gemm_seconds == pytest.approx(0.33, abs=0.03)


class TestQuantizedCounts:
    """Qwen3-0.6B, where group scales have 2 bytes and zero points one, and row scales 4."""

    LINEAR = 28 * (1024 * 4096 + 2048 * 1024 + 3 * 1024 * 3072)
    ROWS = 28 * (4096 + 1024 + 2 * 3072 + 1024)
    HEAD = 151936 * 1024

    @pytest.mark.parametrize(
        ("online", "linear", "head"),
        [
            ("fp8", LINEAR + 4 * ROWS, 2 * HEAD),
            ("int8", LINEAR + 4 * ROWS, HEAD + 4 * 151936),
            ("int4", LINEAR // 2 + 2 * LINEAR // 32, HEAD + 4 * 151936),
        ],
    )
    def test_a_step_reads_codes_and_scales(
        self, online: str, linear: int, head: int, tmp_path: Path
    ) -> None:
        model = shape("qwen3-0.6b", tmp_path)
        sizes = WeightBytes(2, choose_quantization({}, online))
        assert model_size.decoder_bytes(model, sizes) == pytest.approx(linear, rel=1e-3)
        assert model_size.head_bytes(model, sizes) == head
        # A quantized head has a table of its own, as the embedding's stays plain.
        others = model_size.num_params(model) - self.LINEAR - (self.HEAD if online == "fp8" else 0)
        total = model_size.model_bytes(model, sizes)
        assert total == pytest.approx(linear + head + 2 * others, rel=1e-3)

    def test_the_config_of_a_checkpoint_decides_layer_by_layer(self, tmp_path: Path) -> None:
        model = shape("qwen3-0.6b", tmp_path)
        config = dict(
            quant_method="awq", bits=4, group_size=128, zero_point=True, version="gemm",
            modules_to_not_convert=["down_proj"],
        )  # fmt: skip
        quantization = choose_quantization({"quantization_config": config}, None)
        sizes = WeightBytes(2, quantization)
        plain = 28 * 1024 * 3072
        quantized = self.LINEAR - plain
        expected = 2 * plain + quantized // 2 + 3 * quantized // 128
        assert model_size.decoder_bytes(model, sizes) == pytest.approx(expected, rel=1e-6)
        assert model_size.head_bytes(model, sizes) == 2 * self.HEAD


class TestMatmulRate:
    """The rate is that of the engine's own kernels, with the weights that most layers have."""

    @pytest.mark.parametrize(
        ("variant", "storage"),
        [("ct, kv scales alone", None), ("ct, mixed", "packed"), ("fp8, some layers", None)],
    )
    def test_the_format_is_that_of_most_weights(
        self,
        variant: str,
        storage: str | None,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """In each of these variants the first rule has another one, or there is none."""
        path = make_model(tmp_path / "model")
        edit_config(path, quantization_config=VARIANTS[variant].config)
        measured: list[WeightFormat] = []

        def measure_machine(_: Placement, weight_format: WeightFormat) -> Machine:
            measured.append(weight_format)
            return H200

        monkeypatch.setattr(measure, "measure_machine", measure_machine)
        lengths = WorkloadOptions(max_input_len=100, max_output_len=100)
        measure.describe(make_plan({"model": path, "device": "cpu"}, None, lengths, tmp_path))
        assert [each.scheme and each.scheme.storage for each in measured] == [storage]

    def test_the_engines_kernels_are_measured(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those in C++ do not know float16; the plain ones are the engine's then."""
        monkeypatch.setitem(machine.MATMUL_SIZES, "cpu", 64)
        plan = make_plan(
            {"device": "cpu", "dtype": "float16", "quantization": "int8"}, "qwen3-42m",
            WorkloadOptions(), tmp_path,
        )  # fmt: skip
        placement = resolve_placement(plan.config, plan.model, ALONE)
        assert machine.matmul_rate(placement, format_of(INT8)) > 0


class TestCommandLine:
    @pytest.mark.slow
    def test_a_tiny_run_has_a_table_and_a_file_of_json(
        self, model_dir: Path, tmp_path: Path
    ) -> None:
        file = tmp_path / "result.json"
        run = run_cli(
            f"--model={model_dir}", "--num-seqs=3", "--min-input-len=4", "--max-input-len=9",
            "--min-output-len=2", "--max-output-len=5", "--max-model-len=64",
            "--num-kvcache-blocks=32", "--repeats=2", "--device=cpu", "--dtype=float32",
            f"--json={file}",
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        text, result = run.stdout, json.loads(file.read_text())
        assert text.index("roofline:") < text.index("run 1:") < text.index("of the roofline")
        assert "  measured: read " in text
        assert "{" not in text, "the JSON is in the file alone"
        assert result["device"] == "cpu" and result["dtype"] == "float32"
        assert result["torch"] == torch.__version__ and "cores" in result["machine"]
        assert result["attention_backend"] in ("cpu", "torch") and result["preemptions"] == 0
        load, floor = result["workload"], result["roofline"]
        assert 12 <= load["input_tokens"] <= 27 and 6 <= load["output_tokens"] <= 15
        seconds = result["seconds"]
        assert len(seconds) == 2 and min(seconds) <= result["median_seconds"] <= max(seconds)
        assert result["output_tokens_per_second"] == pytest.approx(
            load["output_tokens"] / result["median_seconds"]
        )
        assert result["roofline_percent"] == pytest.approx(
            100 * floor["seconds"] / result["median_seconds"]
        )
        parts = ("prefill_seconds", "decode_gemm_seconds", "decode_kv_seconds")
        assert floor["seconds"] == pytest.approx(sum(floor[part] for part in parts))
        assert floor["memory_bytes_per_second"] > 0 and floor["matmul_flops_per_second"] > 0
        assert result["prefill_tokens_per_second"] > 0 and result["decode_tokens_per_second"] > 0

    @pytest.mark.parametrize("percent", [99.9, 100.2])
    def test_a_figure_above_the_roofline_has_a_reason(
        self, percent: float, capsys: pytest.CaptureFixture[str]
    ) -> None:
        result: dict[str, Any] = dict.fromkeys(
            ("output_tokens_per_second", "prefill_tokens_per_second", "decode_tokens_per_second",
             "median_seconds", "preemptions", "drafted_tokens"), 0
        )  # fmt: skip
        result |= dict(seconds=[1.0], attention_backend="cpu", workload=dict(acceptance=None))
        measure.print_result(result | dict(roofline_percent=percent))
        (line,) = (text for text in capsys.readouterr().out.splitlines() if "roofline" in text)
        assert f"{percent}% of the roofline" in line
        assert ("slowed the measured rates" in line) == (percent > 100)

    def test_repeats_do_not_find_their_prompts_in_the_cache(
        self, model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A second run of the same prompts would skip their prefill."""
        cached: list[int] = []

        class SpyingLLM(LLM):
            def generate(self, *args: Any, **kwargs: Any) -> Any:
                outputs = super().generate(*args, **kwargs)
                cached.extend(output["num_cached_tokens"] for output in outputs)
                return outputs

        monkeypatch.setattr(measure, "LLM", SpyingLLM)
        monkeypatch.setattr(measure, "measure_machine", lambda *_: H200)
        bench.main(
            [f"--model={model_dir}", "--num-seqs=2", "--min-input-len=40", "--max-input-len=50",
             "--min-output-len=2", "--max-output-len=3", "--max-model-len=64",
             "--num-kvcache-blocks=64", "--device=cpu", "--json"]
        )  # fmt: skip
        assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["seconds"]) == 3
        assert cached == [0] * 7  # the warm-up's, and two in each of three runs

    @pytest.mark.parametrize(
        ("method", "draft"), [("draft_model", "qwen3-42m"), ("eagle3", "qwen3-0.6b")]
    )
    def test_a_shape_may_be_the_draft_model_or_a_head(
        self, method: str, draft: str, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        """Random weights are never right, but they are asked."""
        monkeypatch.setitem(SHAPES, "qwen3-0.6b", (64, 960, 6, 4, 2, 16, 259, True))
        monkeypatch.setitem(SHAPES, "qwen3-42m", (64, 96, 1, 4, 2, 16, 259, True))
        monkeypatch.setattr(measure, "measure_machine", lambda *_: H200)
        bench.main(
            ["--shape=qwen3-0.6b", "--num-seqs=2", "--min-input-len=4", "--max-input-len=5",
             "--min-output-len=40", "--max-output-len=40", "--num-kvcache-blocks=300",
             "--repeats=1", "--device=cpu", "--json",
             f'--speculative-config={{"method": "{method}", "model": "{draft}"}}']
        )  # fmt: skip
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert result["drafted_tokens"] > 0
        asked = result["options"]["speculative_config"]
        assert (asked["method"], asked["model"]) == (method, draft), "the shape, and not its file"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--quantization=awq"], "qwen3-42m: --quantization='awq': the checkpoint has plain"),
            (
                [speculate("eagle3", "qwen3-0.6b")],
                "--speculative-config, head 'qwen3-0.6b': the head is made for another model",
            ),
            (
                [speculate("draft_model", "qwen3-42m", quantization="gptq")],
                "draft model 'qwen3-42m': qwen3-42m: quantization='gptq': the checkpoint has",
            ),
            (
                [speculate("eagle3", "/nope/x")],
                "--speculative-config, head '/nope/x': model directory '/nope/x' does not exist",
            ),
        ],
    )
    def test_errors_name_shapes_and_come_before_anything_is_measured(
        self, options: list[str], message: str, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(measure, "measure_machine", lambda *_: pytest.fail("it is measured"))
        assert bench.main(["--shape=qwen3-42m", "--device=cpu", *options]) == 1
        out, err = capsys.readouterr()
        assert out == "" and message in err and tempfile.gettempdir() not in err

    @pytest.mark.parametrize(
        ("option", "draft", "hint"),
        [
            ("--shape=qwen3-42m", "qwen3-43m", "with --shape it may be one of qwen3-42m, qwen3-0"),
            (f"--model={EMBEDDED_MODEL}", "qwen3-43m", "with --shape it may be one of qwen3-42m"),
            (f"--model={EMBEDDED_MODEL}", "qwen3-42m", "it is a shape, which can guess for anoth"),
        ],
    )
    def test_a_missing_draft_model_may_have_been_meant_as_a_shape(
        self, option: str, draft: str, hint: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lengths = ["--max-input-len=100", "--max-output-len=100"]
        asked = [option, *lengths, "--device=cpu", speculate("draft_model", draft)]
        assert bench.main(asked) == 1
        out, err = capsys.readouterr()
        message = f"draft model '{draft}': model directory '{draft}' does not exist ("
        assert out == "" and message in err and f"); {hint}" in err

    def test_a_draft_model_with_another_tokenizer_is_found_before_anything_is_measured(
        self, model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(measure, "measure_machine", lambda *_: pytest.fail("it is measured"))
        draft = speculate("draft_model", EMBEDDED_MODEL)
        options = ["--max-input-len=100", "--max-output-len=100", "--device=cpu", draft]
        assert bench.main([f"--model={model_dir}", *options]) == 1
        out, err = capsys.readouterr()
        assert out == "" and "the draft model must have the model's tokenizer" in err

    def test_a_shape_needs_no_files(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(SHAPES, "qwen3-42m", (64, 96, 2, 4, 2, 16, 259, True))
        monkeypatch.setattr(measure, "measure_machine", lambda *_: H200)
        bench.main(
            ["--shape=qwen3-42m", "--num-seqs=2", "--min-input-len=4", "--max-input-len=5",
             "--min-output-len=1", "--max-output-len=1", "--num-kvcache-blocks=300",
             "--repeats=1", "--device=cpu", "--json"]
        )  # fmt: skip
        out, err = capsys.readouterr()
        result = json.loads(out)
        assert result["model"] == "qwen3-42m"
        assert tempfile.gettempdir() not in out + err, "no name of a temporary folder"
        assert result["options"]["load_format"] == "dummy"
        assert result["workload"]["output_tokens"] == 2
        assert result["roofline"]["decode_gemm_seconds"] == 0  # prefill yields one token each

    def test_a_profile_is_a_trace_of_steps_after_the_measured_runs(
        self,
        model_dir: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Viewers can open it, and its steps are not counted as measured ones."""
        monkeypatch.setattr(measure, "measure_machine", lambda *_: H200)
        traced: list[dict[str, int]] = []
        write_trace = trace.write_trace

        def spying(llm: LLM, *rest: Any) -> str:
            traced.append(dict(llm.stats()))
            text: str = write_trace(llm, *rest)
            traced.append(dict(llm.stats()))
            return text

        monkeypatch.setattr(trace, "write_trace", spying)
        file = tmp_path / "trace.json"
        bench.main(
            [f"--model={model_dir}", "--num-seqs=3", "--min-input-len=20", "--max-input-len=30",
             "--min-output-len=6", "--max-output-len=9", "--max-model-len=64",
             "--num-kvcache-blocks=32", "--repeats=1", "--device=cpu", f"--profile={file}",
             "--json"]
        )  # fmt: skip
        events = json.loads(file.read_text())["traceEvents"]
        names = [event.get("name", "") for event in events]
        steps = sorted(name for name in names if name.startswith("step "))
        assert steps == ["step 1: prefill", *(f"step {i}: decode" for i in range(2, 6))]
        assert any(name.startswith("aten::") for name in names)
        out, err = capsys.readouterr()
        # The figures of the runs come first, then the trace's file and its top operators.
        assert err.index("of the roofline") < err.index(str(file)) < err.index("aten::")
        result = json.loads(out)
        assert len(result["seconds"]) == 1
        before, after = traced
        prompts, _ = draw(259, num_seqs=3, min_input_len=20, max_input_len=30)
        lengths = list(map(len, prompts))
        # What the measured runs left in the prefix cache must not shorten the trace's prefill.
        assert after["prefill_tokens"] - before["prefill_tokens"] == lengths[0] + sum(lengths)

    def test_a_slow_machine_gets_a_hint_at_smaller_options(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(measure, "measure_machine", lambda *_: Machine(1e10, 1e11))
        options = {"device": "cpu", "dtype": "bfloat16"}
        plan = make_plan(options, bench.SHAPE, WorkloadOptions(), tmp_path)
        measure.print_floor(measure.describe(plan))
        out = capsys.readouterr().out
        assert "a run takes 72 minutes or more" in out and "--shape qwen3-42m" in out
        assert "--num-seqs 16 --max-input-len 128 --max-output-len 128\n" in out
        few = dataclasses.replace(WorkloadOptions(), num_seqs=4)
        measure.print_floor(measure.describe(make_plan(options, bench.SHAPE, few, tmp_path)))
        assert "--num-seqs 4 --max-input-len 128" in capsys.readouterr().out  # not more than asked

    def test_the_types_of_weights_and_kv_are_printed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(measure, "measure_machine", lambda *_: Machine(1e10, 1e11))
        options = {"device": "cpu", "dtype": "bfloat16", "quantization": "int8"}
        plan = make_plan(
            options | {"kv_cache_dtype": "fp8"}, bench.SHAPE, WorkloadOptions(), tmp_path
        )
        measure.print_floor(measure.describe(plan))
        out = capsys.readouterr().out
        assert "bfloat16; 8-bit, a scale for each output; KV in float8_e4m3fn, on " in out

    def test_help_names_the_options_and_their_defaults(self) -> None:
        run = run_cli("--help")
        assert run.returncode == 0
        for text in ("--shape", "--attention-backend", "--json", "(default: 1024)"):
            assert text in run.stdout

    @pytest.mark.slow
    @pytest.mark.parametrize("was_there", [False, True])
    def test_a_failed_run_keeps_the_last_result(
        self, was_there: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        files = [tmp_path / "result.json", tmp_path / "trace.json"]
        for file in files:
            if was_there:
                file.write_text("the last one")
        options = [f"--json={files[0]}", f"--profile={files[1]}", "--num-kvcache-blocks=4"]
        assert bench.main([*options, "--shape=qwen3-42m", "--num-seqs=1"]) == 1
        assert "does not fit" in capsys.readouterr().err
        assert [file.read_text() for file in files if file.exists()] == ["the last one"] * (
            2 * was_there
        )

    @pytest.mark.parametrize(
        ("options", "status", "message"),
        [
            (["--shape=qwen3-9000b"], 2, "invalid choice"),
            (["--shape=qwen3-8b", "--model=x"], 2, "exclude each other"),
            (["--model=/nowhere"], 1, "/nowhere"),
            (["--num-seqs=0"], 2, "--num-seqs must be >= 1, got 0"),
            (["--num-seqs=many"], 2, "cannot read 'many'"),
            (["--seed=-1"], 2, "--seed must be >= 0, got -1"),
            (["--repeats=0"], 2, "must be at least 1, got 0"),
            (["--min-input-len=9", "--max-input-len=8"], 2, "8 is less than --min-input-len=9"),
            (["--json=x", "--profile=x"], 2, "--json and --profile must be different files"),
            (["--max-input-len=4000"], 2, "--max-model-len=4096, got 5024"),
            (["--device=tpu"], 2, "--device must be"),
            (["--json=/nowhere/result.json"], 1, "/nowhere"),
            (["--profile=/nowhere/trace.json"], 1, "/nowhere"),
            (["--profile=trace.json", "--peers"], 2, "--profile and --peers exclude each other"),
            (["--acceptance=0.5", "--peers"], 2, "--acceptance and --peers exclude each other"),
            (["--peer-path=vllm=."], 2, "need --peers"),
            (["--peers", "sglang"], 2, "nano-vllm, vllm, transformers; got sglang"),
            (["--peers", "--peer-python=vllm"], 2, "NAME=PATH with a NAME of nano-vllm"),
            (["--peers", "--peer-python=vllm=/nowhere/python"], 1, "python is not a program"),
            (["--peers", "--peer-path=vllm=/nowhere"], 1, "/nowhere is not a directory"),
            (["--peers", "vllm", "--peer-python=vllm=false"], 2, "finds no package 'vllm'"),
            (
                ["--peers", "nano-vllm", f"--peer-path=nano-vllm={BENCH.parent}"], 2,
                "finds this project itself",
            ),
        ],
    )  # fmt: skip
    def test_a_bad_option_is_one_line_and_no_traceback(
        self, options: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        try:
            got = bench.main(options)
        except SystemExit as end:
            got = end.code
        assert got == status
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and message in err

    def test_what_the_engine_refuses_is_an_error_of_the_options(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(measure, "measure_machine", lambda *_: H200)
        options = ["--shape=qwen3-42m", "--device=cpu", "--attention-backend=flash_attn"]
        assert bench.main(options) == 1
        err = capsys.readouterr().err
        assert "needs a CUDA device" in err and "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("command", [("-m", "nanovllm", "bench"), (str(BENCH),)])
def test_the_benchmark_runs_outside_the_checkout(command: tuple[str, ...], tmp_path: Path) -> None:
    """The command, and the script with a model of its own."""
    short = ("--num-seqs=2", "--max-input-len=100", "--max-output-len=100", "--repeats=1")
    options = [*short, "--device=cpu", "--engine-seed=3", "--json"]
    if command[0] != "-m":
        options.append(f"--model={EMBEDDED_MODEL}")
    env = {**os.environ, "PYTHONPATH": str(BENCH.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, *options], capture_output=True, text=True, timeout=LIMIT,
        env=env, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr.startswith(f"{EMBEDDED_MODEL}: 1M parameters, ")
    result = json.loads(done.stdout)
    assert result["model"] == EMBEDDED_MODEL
    assert result["workload"]["output_tokens"] == 200
    assert (result["options"]["seed"], result["options"]["max_model_len"]) == (3, 4096)


def test_whole_experts_need_no_divisible_width(tmp_path: Path) -> None:
    """A plan accepts and refuses expert parallelism as the engine does."""
    options = {"device": "cpu", "tensor_parallel_size": 4, "enable_expert_parallel": True}
    write_shape("qwen3-30b-a3b", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"moe_intermediate_size": 770}))
    plan = make_plan({**options, "model": str(tmp_path)}, None, WorkloadOptions(), tmp_path)
    assert plan.config.enable_expert_parallel
    with pytest.raises(ValueError, match="this model has no experts"):
        make_plan(options, "qwen3-42m", WorkloadOptions(), tmp_path)


def test_the_scripts_default_is_the_classic_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[Any] = []

    def plan(options: Any, shape: Any, *_: Any) -> None:
        shapes.append(shape)
        raise ValueError("stop here")

    monkeypatch.setattr("nanovllm.bench.plan.make_plan", plan)
    assert bench.main([]) == bench.main(["--model=x"]) == bench.main(["--shape=qwen3-8b"]) == 1
    assert shapes == ["qwen3-0.6b", None, "qwen3-8b"]
