"""Traces of all ranks, written where an option says."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from reference import audit_at_rest, make_llm

from nanovllm import LLM, SamplingParams
from nanovllm.async_llm import AsyncLLM

pytestmark = pytest.mark.usefixtures("one_thread")

PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def names(path: Path) -> set[str]:
    """The names of a trace's events."""
    with gzip.open(path) as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_writes_a_trace(ranks: int, model_dir: Path, tmp_path: Path) -> None:
    """Of what was computed in between, again and again; answers do not change."""
    folder = tmp_path / "a" / "b"
    with make_llm(model_dir, tensor_parallel_size=ranks, profiler_dir=folder) as llm:
        want = llm.generate([[1, 2]], PARAMS, use_tqdm=False)[0].token_ids
        seen: set[Path] = set()
        for _ in range(2):
            llm.start_profile()
            assert llm.generate([[1, 2]], PARAMS, use_tqdm=False)[0].token_ids == want
            paths = llm.stop_profile()
            assert [path.name.split("-")[-1] for path in paths] == [
                f"rank{rank}.pt.trace.json.gz" for rank in range(ranks)
            ]
            for path in paths:
                assert path.parent == folder
                assert any(name.startswith("aten::") for name in names(path))
            seen.update(paths)
        assert len(seen) == 2 * ranks == len(list(folder.iterdir()))
        audit_at_rest(llm)


def test_requests_in_the_middle_go_on(model_dir: Path, tmp_path: Path) -> None:
    with make_llm(model_dir, profiler_dir=tmp_path, overlap=True) as llm:
        want = llm.generate([[1, 2]], PARAMS, use_tqdm=False)[0].token_ids
        llm.add_request([1, 2], PARAMS)
        llm.step()
        llm.start_profile()
        outputs = llm.step()
        llm.stop_profile()
        while not llm.is_finished():
            outputs += llm.step()
        assert [output.token_ids for output in outputs] == [want]


def test_calls_out_of_order_are_named_errors(model_dir: Path, tmp_path: Path) -> None:
    message = "profiler_dir, which must be a directory, got None"
    with make_llm(model_dir) as llm, pytest.raises(ValueError, match=message):
        llm.start_profile()
    with make_llm(model_dir, profiler_dir=tmp_path) as llm:
        with pytest.raises(RuntimeError, match="no profile is being recorded"):
            llm.stop_profile()
        llm.start_profile()
        with pytest.raises(RuntimeError, match="recorded already"):
            llm.start_profile()
        with make_llm(model_dir, profiler_dir=tmp_path) as other:
            with pytest.raises(RuntimeError, match="for another engine"):
                other.start_profile()
            assert other.generate([[1]], PARAMS, use_tqdm=False)
    assert not list(tmp_path.iterdir()), "a recording that was not ended is dropped"
    with make_llm(model_dir, profiler_dir=tmp_path) as llm:
        llm.start_profile()
        assert len(llm.stop_profile()) == 1


def test_a_directory_that_cannot_be_made_is_an_error(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with make_llm(model_dir, profiler_dir=tmp_path / "file" / "x") as llm:
        with pytest.raises(OSError, match="profiler_dir must be a directory that can be writ"):
            llm.start_profile()
        assert llm.generate([[1]], PARAMS, use_tqdm=False)
        with pytest.raises(RuntimeError, match="no profile is being recorded"):
            llm.stop_profile()


def test_async_engines_are_recorded(model_dir: Path, tmp_path: Path) -> None:
    async def run() -> Any:
        options: dict[str, Any] = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.05)
        async with AsyncLLM(model_dir, profiler_dir=tmp_path, **options) as llm:
            with pytest.raises(RuntimeError, match="no profile is being recorded"):
                await llm.stop_profile()
            await llm.start_profile()
            await llm.complete([1, 2], PARAMS)
            return await llm.stop_profile()

    (path,) = asyncio.run(run())
    assert any(name.startswith("aten::") for name in names(path))


@pytest.mark.cuda
def test_traces_have_the_devices_work(model_dir: Path, tmp_path: Path) -> None:
    with LLM(model_dir, device="cuda", num_kvcache_blocks=200, profiler_dir=tmp_path) as llm:
        llm.start_profile()
        llm.generate([[1, 2]], PARAMS, use_tqdm=False)
        (path,) = llm.stop_profile()
        with gzip.open(path) as file:
            kinds = {event.get("cat") for event in json.load(file)["traceEvents"]}
        assert "kernel" in kinds


def test_a_start_that_fails_on_one_rank_is_undone_on_all(model_dir: Path, tmp_path: Path) -> None:
    with (
        make_llm(model_dir, profiler_dir=tmp_path / "one") as one,
        make_llm(model_dir, tensor_parallel_size=2, profiler_dir=tmp_path / "two") as two,
    ):
        one.start_profile()
        with pytest.raises(RuntimeError, match="for another engine"):
            two.start_profile()
        assert len(one.stop_profile()) == 1, "it goes on"
        two.start_profile()
        assert len(two.stop_profile()) == 2
