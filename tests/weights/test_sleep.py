"""Sleep: memory is freed, and an engine that wakes up answers as before."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import make_adapter
from audits import audit_scheduler
from conftest import make_model
from safetensors.torch import load_file

from nanovllm import LLM, AsyncLLM, LoRARequest, SamplingParams
from nanovllm.engine.errors import NotReadyError
from nanovllm.utils.resources import GIB
from nanovllm.weights.sleep_memory import SleepMemory
from nanovllm.weights.sleeping import Save
from nanovllm.weights.tensors import slots_of, weights_of

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = [[3, 14, 15, 92, 65], [35, 89, 79]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def make_llm(path: Path, size: int = 1, **options: Any) -> LLM:
    defaults = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.02, max_model_len=128)
    return LLM(path, **defaults | dict(tensor_parallel_size=size, enable_sleep_mode=True) | options)


def generate(llm: LLM) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(IDS, GREEDY, use_tqdm=False)]


def touch(llm: LLM) -> None:
    """Write to the KV pool: its pages are taken then."""
    with torch.inference_mode():
        llm.model_runner.shard.caches.kv.cache.fill_(1)


def resident_bytes() -> int:
    """What this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (2, {}),
        (1, dict(dtype="bfloat16", kvcache_block_size=4)),
        (1, dict(quantization="int8")),
        (1, dict(load_format="dummy")),
    ],
)
def test_answers_after_sleep_equal_those_before(
    level: int, size: int, options: dict[str, Any], model_dir: Path
) -> None:
    with make_llm(model_dir, size, **options) as llm:
        before = generate(llm)
        for _ in range(2):
            llm.sleep(level)
            assert llm.is_sleeping
            llm.wake_up()
            assert not llm.is_sleeping
            assert generate(llm) == before
            audit_scheduler(llm.scheduler)


@pytest.mark.parametrize(
    "options", [dict(tie_word_embeddings=True), dict(family="Qwen3Moe", num_experts=4,
     num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[])],
    ids=["tied", "moe"],
)  # fmt: skip
def test_other_models_are_loaded_again(options: dict[str, Any], tmp_path: Path) -> None:
    make_model(tmp_path / "model", **options)
    with make_llm(tmp_path / "model") as llm:
        before = generate(llm)
        llm.sleep(2)
        llm.wake_up()
        assert generate(llm) == before


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_random_weights_are_made_again(backend: str, tied: bool, tmp_path: Path) -> None:
    """In bfloat16, and for a table whose size decides how a type's numbers are drawn."""
    path = make_model(tmp_path / "model", hidden_size=40, tie_word_embeddings=tied)
    with make_llm(path, dtype="bfloat16", load_format="dummy", attention_backend=backend) as llm:
        before = llm.get_weights()
        llm.sleep(2)
        llm.wake_up()
        after = llm.get_weights()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_weights_and_cache_wake_up_one_after_the_other(model_dir: Path) -> None:
    """As trainers do it: new weights come before there is a KV pool."""
    tensors = load_file(model_dir / "model.safetensors")
    with make_llm(model_dir) as llm:
        before = generate(llm)
        llm.sleep(level=2)
        with pytest.raises(
            RuntimeError, match=r"update_weights needs the weights; call .*\) first"
        ):
            llm.update_weights(tensors)
        llm.wake_up(tags=["weights"])
        assert llm.is_sleeping
        with pytest.raises(RuntimeError, match=r"\(kv_cache is freed\); call wake_up\(\) first"):
            generate(llm)
        with pytest.raises(RuntimeError, match=r"dropped the weights; update all of them"):
            llm.get_weights()
        llm.update_weights(tensors)
        llm.wake_up(tags=["kv_cache"])
        assert generate(llm) == before
        llm.sleep(level=2)
        llm.wake_up(["kv_cache"])
        llm.wake_up(["weights"])
        with pytest.raises(RuntimeError, match="dropped the weights"):
            generate(llm)
        llm.reload_weights()
        assert generate(llm) == before
        llm.wake_up()


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, dict(dtype="bfloat16")),
        (2, dict(dtype="bfloat16")),
        (1, dict(quantization="int8")),
        (1, dict(quantization="int8", attention_backend="torch")),
    ],
)
@pytest.mark.parametrize("kind", [list, iter])
def test_several_updates_bring_what_was_dropped(
    size: int, options: dict[str, Any], kind: Any, model_dir: Path
) -> None:
    """Also the parts of a fused layer, whose layout is made of all of them."""
    tensors = load_file(model_dir / "model.safetensors")
    first = {n: t for n, t in tensors.items() if "q_proj" in n or "layers.1.mlp.up_proj" in n}
    rest = {name: tensor for name, tensor in tensors.items() if name not in first}
    with make_llm(model_dir, size, **options) as llm:
        before = generate(llm)
        for _ in range(2):
            llm.sleep(2)
            llm.wake_up(["weights"])
            llm.update_weights(kind(first.items()))
            llm.wake_up(["kv_cache"])
        with pytest.raises(NotReadyError, match="dropped the weights; update all of them"):
            generate(llm)
        llm.begin_update()
        llm.cancel_update()  # what other updates have brought stays
        llm.update_weights(kind(rest.items()))
        assert generate(llm) == before
        if options.get("quantization"):
            with pytest.raises(ValueError, match="can be updated only together"):
                llm.update_weights(first)


def test_wake_up_keeps_newer_weights(model_dir: Path, tmp_path: Path) -> None:
    """It loads the checkpoint only if this very call gets the memory of dropped weights."""
    make_model(tmp_path / "other", seed=1)
    name, norm = (new := load_file(tmp_path / "other" / "model.safetensors")).popitem()
    with make_llm(model_dir) as llm:
        llm.sleep(2)
        llm.wake_up(["weights"])
        llm.update_weights({name: norm})
        llm.wake_up()
        with pytest.raises(NotReadyError, match="dropped the weights; update all of them"):
            generate(llm)
        llm.update_weights(new)
        assert torch.equal(llm.get_weights(name)[name], norm)
        llm.begin_update()
        llm.load_weights([(name, norm)])
        llm.cancel_update()
        llm.wake_up()  # nothing sleeps
        with pytest.raises(NotReadyError, match=r"has failed.*update all of them"):
            generate(llm)


@pytest.mark.parametrize("reloads", [False, True])
def test_what_waits_for_another_update_may_be_given_again(reloads: bool, model_dir: Path) -> None:
    """Also where the part that the layer has comes last."""
    tensors = load_file(model_dir / "model.safetensors")
    first = {name: tensor for name, tensor in tensors.items() if "up_proj" in name}
    with make_llm(model_dir, 1, quantization="int8") as llm:
        before = generate(llm)
        llm.sleep(2)
        llm.wake_up(["weights"])
        llm.update_weights({name: torch.zeros_like(tensor) for name, tensor in first.items()})
        llm.wake_up(["kv_cache"])
        if reloads:
            llm.reload_weights()
        else:
            llm.update_weights(tensors)
        assert generate(llm) == before


def test_requests_are_refused_while_asleep(model_dir: Path) -> None:
    with make_llm(model_dir, max_num_seqs=1) as llm:
        before = generate(llm)
        waiting = llm.add_request(IDS[0], GREEDY)
        stream = llm.stream([IDS[1]], GREEDY)
        llm.sleep()
        for call in (
            lambda: generate(llm), lambda: llm.add_request([1]), llm.step, lambda: next(stream),
            lambda: llm.stream([[1]]), lambda: llm.embed([[1]]),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match=r"sleeps \(weights and kv_cache are freed\)"):
                call()
        with pytest.raises(RuntimeError, match="sleeps already"):
            llm.sleep()
        llm.wake_up()
        outputs: list[Any] = []
        while not outputs:
            outputs = llm.step()
        assert outputs[0]["request_id"] == waiting
        assert outputs[0]["token_ids"] == before[0]


def test_running_requests_are_refused_or_aborted(model_dir: Path) -> None:
    with make_llm(model_dir) as llm:
        for ids in IDS:
            llm.add_request(ids, GREEDY)
        llm.step()
        with pytest.raises(RuntimeError, match="sleep while 2 requests are running"):
            llm.sleep()
        with pytest.raises(RuntimeError, match="begin_update while 2 requests are running"):
            llm.begin_update()
        llm.sleep(running="abort")
        llm.wake_up()
        assert [output["finish_reason"] for output in llm.step()] == ["abort", "abort"]


def test_adapters_are_not_read_while_asleep(model_dir: Path, tmp_path: Path) -> None:
    """They are compared with weights that have no memory."""
    make_adapter(model_dir, tmp_path / "adapter")
    with make_llm(model_dir, enable_lora=True) as llm:
        adapter = LoRARequest("mine", tmp_path / "adapter")
        llm.sleep(2)
        with pytest.raises(NotReadyError, match="this LLM sleeps"):
            llm.check_adapter(adapter)
        llm.wake_up()
        llm.check_adapter(adapter)
        llm.generate(IDS[0], GREEDY, use_tqdm=False, lora_request=adapter)


def test_aborted_requests_are_returned_if_sleep_fails(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no memory to pin")

    with make_llm(model_dir) as llm:
        before = generate(llm)
        llm.add_request(IDS[0], GREEDY)
        llm.step()
        with monkeypatch.context() as patch:
            patch.setattr(llm.model_runner, "everywhere", fail)
            with pytest.raises(MemoryError):
                llm.sleep(running="abort")
        assert [output["finish_reason"] for output in llm.step()] == ["abort"]
        assert generate(llm) == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.sleep(3), "level must be .*, got 3"),
        (lambda llm: llm.sleep(running="wait"), "running must be"),
        (lambda llm: llm.wake_up(["kv"]), "tags must be .*, got 'kv'"),
        (lambda llm: llm.wake_up("weights"), "tags must be a list of tags, got 'weights'"),
    ],
)
def test_bad_arguments_change_nothing(call: Any, message: str, model_dir: Path) -> None:
    with make_llm(model_dir) as llm:
        with pytest.raises((TypeError, ValueError), match=message):
            call(llm)
        assert not llm.is_sleeping
        generate(llm)


def test_the_option_is_needed(model_dir: Path) -> None:
    with (
        make_llm(model_dir, enable_sleep_mode=False) as llm,
        pytest.raises(ValueError, match="sleep needs an engine with enable_sleep_mode=True"),
    ):
        llm.sleep()


def test_memory_is_returned_on_a_cpu(tmp_path: Path) -> None:
    """Level 1 frees the KV pool, level 2 the weights, too."""
    make_model(tmp_path / "model", hidden_size=512, intermediate_size=4096, num_hidden_layers=4)
    with make_llm(
        tmp_path / "model", cpu_kvcache_gib=0.1, max_model_len=512, num_kvcache_blocks=None
    ) as llm:
        pool, held = 0.1 * GIB, sum(t.nbytes for t in llm.get_weights().values())
        touch(llm)
        full = resident_bytes()
        llm.sleep(1)
        assert full - resident_bytes() > 0.9 * pool
        llm.wake_up()
        touch(llm)
        llm.sleep(2)
        assert full - resident_bytes() > 0.9 * (pool + held)
        llm.wake_up()
        generate(llm)


class HostRegion:
    """A region that is on the CPU, and whose values are lost when it is unmapped."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self._saved: torch.Tensor | None = None

    @property
    def bytes(self) -> torch.Tensor:
        return self._memory

    def map(self, num_bytes: int | None = None) -> None: ...

    def unmap(self) -> None:
        self._memory.fill_(255)

    def save(self) -> None:
        self._saved = self._memory.clone()

    def drop_saved(self) -> None:
        self._saved = None

    def restore(self) -> None:
        if self._saved is None:
            self._memory.zero_()
        else:
            self._memory.copy_(self._saved)

    def close(self) -> None: ...


def test_nothing_is_freed_if_the_host_has_no_memory() -> None:
    """What was saved by then is old the next time."""
    memory, values = SleepMemory(HostRegion), torch.arange(64)

    def fail() -> None:
        raise MemoryError("no memory to pin")

    memory.move_weights([values], [draft := torch.arange(32)])
    (weights,), (drafts,) = memory._weights, memory._drafts
    weights.save = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        memory.save(keeps_weights=True)
    assert values.tolist() == [*range(64)] and draft.tolist() == [*range(32)]
    assert isinstance(drafts, HostRegion) and drafts._saved is None


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_that_cannot_save_its_weights_stays_awake(size: int, model_dir: Path) -> None:
    """It is the last rank that has no memory; the others free what they have saved."""
    rank_0 = os.getpid()

    def have_no_memory(_: torch.nn.Module) -> None:
        def fail(*_: Any) -> None:
            raise MemoryError("no memory to pin")

        if size == 1 or os.getpid() != rank_0:
            Save.run = fail  # type: ignore[method-assign]

    with pytest.MonkeyPatch.context() as patch, make_llm(model_dir, size) as llm:
        patch.setattr(Save, "run", Save.run)  # so that it is restored
        before = generate(llm)
        region = HostRegion(8)
        shard = llm.model_runner.shard
        shard.memory = SleepMemory(HostRegion)
        shard.memory._weights = [region]
        llm.apply_model(have_no_memory)
        with pytest.raises(MemoryError, match="no memory to pin"):
            llm.sleep()
        assert not llm.is_sleeping and region._saved is None
        assert generate(llm) == before


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.usefixtures("plain_products")
def test_weights_that_move_keep_their_values_and_what_they_share(
    tied: bool, tmp_path: Path
) -> None:
    """Here on the CPU, in the layout that plain kernels read; on a GPU `test_weights_cuda`."""
    path = make_model(tmp_path / "model", tie_word_embeddings=tied)
    with make_llm(path, dtype="bfloat16", attention_backend="torch") as llm:
        before = generate(llm)
        shard = llm.model_runner.shard
        memory = SleepMemory(HostRegion)
        with shard.computing():
            tensors = weights_of(shard.model)
            memory.move_weights(tensors, tensors[:1])
            assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1
            assert generate(llm) == before
            memory.save(keeps_weights=True)
            memory.release()
            memory.restore(["weights"])
        assert generate(llm) == before
        if tied:
            llm.update_weights(
                {"lm_head.weight": llm.get_weights("lm_head.weight")["lm_head.weight"]}
            )
            assert generate(llm) == before


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.usefixtures("plain_products")
def test_adapters_slots_are_freed_and_come_back_empty(
    level: int, model_dir: Path, tmp_path: Path
) -> None:
    """At the same addresses. Here on the CPU, in the layout that plain kernels read."""
    adapter = LoRARequest("mine", make_adapter(model_dir, tmp_path / "adapter"))
    with make_llm(model_dir, dtype="bfloat16", attention_backend="torch", enable_lora=True) as llm:
        shard = llm.model_runner.shard
        with shard.computing():
            shard.memory = SleepMemory(HostRegion)
            shard.memory.take_over(shard.models)
        slots = slots_of(shard.model)

        def answer() -> Any:
            return llm.generate(IDS, GREEDY, use_tqdm=False, lora_request=adapter)[0]["token_ids"]

        before, places = answer(), [tensor.data_ptr() for tensor in slots]
        assert before != generate(llm)[0]
        assert any(tensor.any() for tensor in slots)
        llm.sleep(level)
        assert all(tensor.view(torch.uint8).eq(255).all() for tensor in slots)
        llm.wake_up()
        assert not any(tensor.any() for tensor in slots)
        assert answer() == before
        assert [tensor.data_ptr() for tensor in slots] == places


def test_updates_of_an_async_llm_follow_each_other(model_dir: Path, tmp_path: Path) -> None:
    """And one that is cancelled is given up, whatever it waits for."""
    make_model(tmp_path / "other", seed=1)
    new, old = (load_file(p / "model.safetensors") for p in (tmp_path / "other", model_dir))
    with make_llm(tmp_path / "other") as llm:
        expected = generate(llm)

    async def main() -> None:
        options = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.02, max_model_len=128)
        async with AsyncLLM(model_dir, **options) as llm:

            async def answers() -> list[list[int]]:
                outputs = await asyncio.gather(*(llm.complete(ids, GREEDY) for ids in IDS))
                return [output["token_ids"] for output in outputs]

            with pytest.raises(TypeError, match="weights must be a dict"):
                await llm.update_weights(None)  # type: ignore[arg-type]
            await asyncio.gather(*(llm.update_weights(weights) for weights in (old, old, new)))
            assert await answers() == expected
            for turns in range(6):
                task = asyncio.create_task(llm.update_weights(old))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                await llm.update_weights(new)
                assert await answers() == expected

    asyncio.run(main())


def test_async_llm_sleeps_and_is_updated(model_dir: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "other", seed=1)
    other = load_file(tmp_path / "other" / "model.safetensors")
    with make_llm(tmp_path / "other") as llm:
        expected = generate(llm)

    # Functions of a function: the engine's process must not import this module.
    def interrupt(_: torch.nn.Module) -> None:
        raise KeyboardInterrupt

    def slow_down(model: torch.nn.Module) -> None:
        model.register_forward_pre_hook(lambda *_: time.sleep(0.01))

    async def main() -> None:
        options = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.02, max_model_len=500)
        async with AsyncLLM(model_dir, enable_sleep_mode=True, **options) as llm:

            async def answers() -> list[list[int]]:
                outputs = await asyncio.gather(*(llm.complete(ids, GREEDY) for ids in IDS))
                return [output["token_ids"] for output in outputs]

            before = await answers()
            await llm.sleep(1)
            assert await llm.is_sleeping()
            with pytest.raises(RuntimeError, match="this LLM sleeps"):
                await answers()
            await llm.wake_up()
            assert await answers() == before
            with pytest.raises(ValueError, match="has no tensor 'nothing'"):
                await llm.update_weights({"nothing": torch.zeros(1)})
            with pytest.raises(ZeroDivisionError):
                await llm.update_weights((name, 1 / 0) for name in other)
            await llm.update_weights(other)
            assert await answers() == expected
            name = "model.norm.weight"
            assert torch.equal((await llm.get_weights([name]))[name], other[name])
            assert await llm.apply_model(lambda model: type(model).__name__) == ["CausalLM"]
            for function, error, message in (
                (lambda model: (p for p in model.parameters()), TypeError,
                 "results of apply_model must pickle"),
                (lambda model: sys.exit("mine"), RuntimeError, "SystemExit: mine"),
                (interrupt, RuntimeError, "KeyboardInterrupt"),
            ):  # fmt: skip
                with pytest.raises(error, match=message):
                    await llm.apply_model(function)
            assert await llm.reset_prefix_cache()
            await llm.apply_model(slow_down)
            long = SamplingParams(temperature=0, max_tokens=490, ignore_eos=True)
            async for _ in (events := llm.generate(IDS[0], long)):
                break
            with pytest.raises(RuntimeError, match="request is running"):
                await llm.update_weights(other)
            await llm.update_weights(other, running="abort")
            last = [event async for event in events]
            assert last[-1]["finish_reason"] == "abort"
            await llm.reload_weights()
            assert await answers() == before

    asyncio.run(main())
