"""Adapters by their names: in the server, in `AsyncLLM` and in batch jobs."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapted import OPTIONS, AdaptedCase, make_adapted_case
from reference import make_llm
from servers import serving
from waiting import LIMIT

from nanovllm import AsyncLLM, LoRARequest, SamplingParams
from nanovllm.batch.submit import submit
from nanovllm.command.main import main

BODY: dict[str, Any] = dict(temperature=0, max_tokens=8, ignore_eos=True)
PARAMS = SamplingParams(**BODY)
LORA = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> AdaptedCase:
    return make_adapted_case(tmp_path_factory.mktemp("adapted"), every=6)


@pytest.fixture(scope="module")
def texts(case: AdaptedCase) -> dict[str | None, str]:
    """What the model says after the prompt "Hello", by adapter."""
    names = [None, *case.adapters]
    with make_llm(case.path, **OPTIONS) as llm:
        outputs = llm.generate(["Hello"] * len(names), PARAMS, False, names)
    return {a and a.name: o["text"] for a, o in zip(names, outputs, strict=True)}


def test_a_server_offers_adapters(
    case: AdaptedCase, texts: dict[str | None, str], tmp_path: Path
) -> None:
    first, second = case.adapters[:2]
    options = ("--lora-modules", f"sql={first.path}", "--allow-lora-updates")
    names = ("--served-model-name", "tiny")
    with (
        serving(tmp_path / "log", str(case.path), *LORA, *options, *names) as server,
        httpx.Client(base_url=server.url, timeout=LIMIT) as client,
    ):

        def text(model: str) -> str:
            answer = client.post("/v1/completions", json=dict(BODY, model=model, prompt="Hello"))
            assert answer.json()["model"] == model
            return str(answer.json()["choices"][0]["text"])

        def error(path: str, status: int, **body: Any) -> str:
            answer = client.post(path, json=body)
            assert answer.status_code == status, answer.text
            return str(answer.json()["error"]["message"])

        assert (text("tiny"), text("sql")) == (texts[None], texts[first.name])
        assert client.post(LOAD, json=dict(lora_name="own", lora_path=second.path)).is_success
        assert text("own") == texts[second.name]
        models = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
        assert [*models] == ["tiny", "sql", "own"]
        assert [each["parent"] for each in models.values()] == [None, "tiny", "tiny"]
        assert models["own"]["root"] == second.path
        assert client.get("/v1/models/own").json()["parent"] == "tiny"

        assert "loaded adapter" in error(LOAD, 400, lora_name="own", lora_path=first.path)
        assert "model's own name" in error(LOAD, 400, lora_name="tiny", lora_path=first.path)
        assert "must be a local directory" in error(LOAD, 400, lora_name="x", lora_path="/none")
        assert "lora_path must be" in error(LOAD, 400, lora_name="x")
        assert "lora_nam" in error(LOAD, 400, lora_nam="x")
        assert "no adapter 'x'" in error(UNLOAD, 404, lora_name="x")
        assert text("own") == texts[second.name]
        replaced = dict(lora_name="own", lora_path=first.path, load_inplace=True)
        assert client.post(LOAD, json=replaced).is_success
        assert text("own") == texts[first.name]
        assert client.post(UNLOAD, json=dict(lora_name="own")).is_success
        assert "'own'" in error("/v1/completions", 404, **BODY, model="own", prompt="Hello")


def test_clients_may_change_adapters_only_with_the_option(
    case: AdaptedCase, tmp_path: Path
) -> None:
    with serving(tmp_path / "log", str(case.path), *LORA) as server:
        for path in (LOAD, UNLOAD):
            answer = httpx.post(
                server.url + path, json=dict(lora_name="x", lora_path="/none"), timeout=LIMIT
            )
            assert answer.status_code == 403
            assert "--allow-lora-updates" in answer.json()["error"]["message"]


def test_async_requests_with_adapters(case: AdaptedCase, tmp_path: Path) -> None:
    options: dict[str, Any] = OPTIONS | dict(max_loras=1, max_cpu_loras=1)
    expected = [tokens[:8] for tokens in case.tokens]

    async def run() -> None:
        common = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.05)
        async with AsyncLLM(case.path, **common | options) as llm:

            async def one(prompt: list[int], adapter: LoRARequest | None) -> list[int]:
                tokens: list[int] = []
                async for event in llm.generate(prompt, PARAMS, lora_request=adapter):
                    tokens += event.token_ids
                return tokens

            asked = zip(case.prompts, case.requests, strict=True)
            assert await asyncio.gather(*(one(*each) for each in asked)) == expected
            with pytest.raises(ValueError, match="lora_request 'bad'"):
                await one(case.prompts[0], LoRARequest("bad", tmp_path / "none"))
            with pytest.raises(TypeError, match="lora_request must be a LoRARequest"):
                await one(case.prompts[0], "sql")  # type: ignore[arg-type]
            assert await one(case.prompts[0], case.requests[0]) == expected[0]

    asyncio.run(run())


def test_a_batch_job_names_adapters_as_models(
    case: AdaptedCase, texts: dict[str | None, str], tmp_path: Path
) -> None:
    names = [None, "linear", "odd", "linear"]
    lines = [
        dict(
            custom_id=str(index), method="POST", url="/v1/completions",
            body=dict(BODY, prompt="Hello", model=name or "any"),
        )
        for index, name in enumerate(names)
    ]  # fmt: skip
    jobs, results = tmp_path / "jobs.jsonl", tmp_path / "results.jsonl"
    jobs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    modules = [f"--lora-modules={each.name}={each.path}" for each in case.adapters[:2]]
    common = ["--device", "cpu", "--dtype", "float32", "--cpu-kvcache-gib", "0.05"]
    arguments = [str(jobs), "-o", str(results), "--model", str(case.path)]
    main(["run-batch", *arguments, *LORA, *modules, *common])
    answers = {
        record["custom_id"]: record["response"]["body"]["choices"][0]["text"]
        for record in map(json.loads, results.read_text().splitlines())
    }
    assert [answers[str(index)] for index in range(4)] == [texts[name] for name in names]


def test_a_batch_embedding_names_an_adapter_as_its_model(case: AdaptedCase, tmp_path: Path) -> None:
    adapter = case.adapters[0]
    module = f"{adapter.name}={adapter.path}"
    with make_llm(case.path, enable_lora=True, max_lora_rank=8, lora_modules=[module]) as llm:
        base, adapted = (
            llm.embed("Hello", use_tqdm=False, lora_request=each)[0].embedding
            for each in (None, adapter)
        )
        assert base != pytest.approx(adapted, abs=1e-3)
        for name, vector in ((adapter.name, adapted), ("any", base)):
            line = dict(
                custom_id=name, method="POST", url="/v1/embeddings",
                body=dict(model=name, input=["Hello", "a"]),
            )  # fmt: skip
            submitted = submit(llm, name, line, {})
            outputs: list[Any] = []
            while not llm.is_finished():
                outputs += llm.step()
            data = submitted.body("", outputs)["data"]
            assert data[0]["embedding"] == pytest.approx(vector, abs=1e-5)


def test_fields_of_adapters_that_vllm_has() -> None:
    asked = LoRARequest("a", 1, lora_local_path="b", base_model_name=None)  # type: ignore[call-arg]
    assert asked == LoRARequest("a", 1, "b")
    with pytest.raises(ValueError, match="base_model_name must be None, got 'x': an adapter"):
        LoRARequest("a", "b", base_model_name="x")
    with pytest.raises(ValueError, match="lora_local_path is another name of lora_path"):
        LoRARequest("a", lora_path="b", lora_local_path="b")
    with pytest.raises(TypeError, match="unknown field 'lora_pth'; did you mean 'lora_path'"):
        LoRARequest("a", lora_pth="b")


@pytest.mark.parametrize(("field", "value"), [("r", "4"), ("lora_alpha", "x")])
def test_a_field_of_the_wrong_type_names_the_adapter(
    field: str, value: str, case: AdaptedCase, tmp_path: Path
) -> None:
    path = tmp_path / "wrong"
    shutil.copytree(case.adapters[0].path, path)
    config = json.loads((path / "adapter_config.json").read_text()) | {field: value}
    (path / "adapter_config.json").write_text(json.dumps(config))
    with (
        make_llm(case.path, enable_lora=True, max_lora_rank=8) as llm,
        pytest.raises(ValueError, match=rf"lora_request 'x': .*{field} must be"),
    ):
        llm.add_request("a", PARAMS, LoRARequest("x", path))
