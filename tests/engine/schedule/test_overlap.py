"""Steps that overlap: the next one begins before the tokens of this one are known.

Only the time may change. The device is the CPU, which is done when a launch returns.
"""

from pathlib import Path
from typing import Any

import pytest
from audits import audit_scheduler
from conftest import make_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import HARD, SMALL_POOL, audit_at_rest, make_llm
from selection import examples

from nanovllm import LLM, SamplingParams
from nanovllm.engine.run.device_table import BUFFERS
from nanovllm.engine.run.launched import Begun, Launched
from nanovllm.engine.schedule.batch import Batch
from nanovllm.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

POOLS: list[dict[str, Any]] = [
    dict(SMALL_POOL, max_num_seqs=5),
    dict(HARD),
    dict(kvcache_block_size=1, num_kvcache_blocks=60, max_num_batched_tokens=9),
    dict(SMALL_POOL, enable_prefix_caching=False),
    dict(HARD, scheduling="mixed"),
]
# For a window of 7: 9 blocks hold 18 tokens, and the longest request has 50.
WINDOW_POOLS: list[dict[str, Any]] = [
    dict(kvcache_block_size=2, num_kvcache_blocks=9, max_num_batched_tokens=12),
    dict(kvcache_block_size=1, num_kvcache_blocks=20),
    dict(kvcache_block_size=4, num_kvcache_blocks=6, scheduling="mixed"),
]


@pytest.fixture(scope="module")
def pairs(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For each pool, an engine that overlaps its steps and one that does not."""
    windowed = make_model(tmp_path_factory.mktemp("model"), family="Mistral", sliding_window=7)
    kinds = [(model_dir, pool) for pool in POOLS] + [(windowed, pool) for pool in WINDOW_POOLS]
    pairs = [
        [make_llm(path, overlap=overlap, max_model_len=56, **pool) for overlap in (True, False)]
        for path, pool in kinds
    ]
    yield pairs
    for pair in pairs:
        for llm in pair:
            llm.close()


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 6),  # in which step it comes
        st.lists(st.integers(0, 3), min_size=1, max_size=20),
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.0, 1.0, 3.0]),
                "max_tokens": st.integers(1, 30),
                "min_tokens": st.just(0),
                "seed": st.integers(0, 99),
                "n": st.sampled_from([1, 1, 1, 3]),
                "stop_token_ids": st.sampled_from([None, range(20, 60), range(200)]),
                "stop": st.sampled_from([None, None, ["a", "bc"]]),
                "logprobs": st.sampled_from([None, None, 2]),
                "prompt_logprobs": st.sampled_from([None, None, 1]),
                "priority": st.sampled_from([0, 0, 1]),
                "top_k": st.sampled_from([-1, -1, 20]),
                "presence_penalty": st.sampled_from([0.0, 0.0, 0.0, 1.0]),
                "bad_words": st.sampled_from([None, None, None, ["e"]]),
            }
        ),
    ),
    min_size=1,
    max_size=10,
)


def run(llm: LLM, requests: list[Any], aborts: dict[int, int]) -> list[RequestOutput | None]:
    """Run requests that arrive and are aborted at given steps; None for aborted ones."""
    ids: dict[int, int] = {}
    outputs: dict[int, RequestOutput | None] = {}
    step = 0
    while len(outputs) < len(requests):
        for index, (arrival, prompt, params) in enumerate(requests):
            if arrival == step:
                ids[llm.add_request(prompt, SamplingParams(**params))] = index
        for request_id, index in ids.items():
            if aborts.get(index) == step and index not in outputs:
                aborted = llm.abort_request(request_id)
                samples = aborted["outputs"]  # some may have ended before
                assert any(sample["finish_reason"] == "abort" for sample in samples)
                assert all(-1 not in sample["token_ids"] for sample in samples)
                outputs[index] = None
        for output in llm.step():
            outputs[ids[output["request_id"]]] = output
        step += 1
        assert step < 2000
        audit_scheduler(llm.scheduler)
    assert llm.is_finished()
    return [outputs[index] for index in range(len(requests))]


@pytest.mark.slow
@settings(
    deadline=None,
    max_examples=examples(120),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_overlapping_steps_keep_every_output(data: st.DataObject, pairs: Any) -> None:
    """Each token is drawn once, for its own sequence and position."""
    ahead, plain = data.draw(st.sampled_from(pairs))
    requests = data.draw(REQUESTS)
    victims = st.dictionaries(st.integers(0, 9), st.integers(1, 20), max_size=2)
    aborts = {i: step for i, step in data.draw(victims).items() if i < len(requests)}
    aborts = {i: max(step, requests[i][0]) for i, step in aborts.items()}
    got, expected = run(ahead, requests, aborts), run(plain, requests, aborts)
    for one, other in zip(got, expected, strict=True):
        if one is None or other is None:  # one of them may have ended before it was aborted
            continue
        for key in ("outputs", "prompt_logprobs", "num_prompt_tokens"):
            assert_alike(one[key], other[key])  # type: ignore[literal-required]


def assert_alike(one: Any, other: Any) -> None:
    """Equal, except that log-probabilities may differ by rounding."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        if "rank" in one:
            assert abs(one.pop("rank") - other.pop("rank")) <= 1  # of values that are all but equal
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_alike(*pair)
    else:
        assert one == (pytest.approx(other, abs=1e-4) if isinstance(one, float) else other)


def count_rows(llm: LLM) -> list[int]:
    """Record how many tokens each step samples."""
    begin, rows = llm.model_runner.begin, []

    def counting(batch: Batch) -> Begun:
        rows.append(len(batch.sampling_seqs))
        return begin(batch)

    llm.model_runner.begin = counting  # type: ignore[method-assign]
    return rows


@pytest.mark.parametrize(
    ("number", "params", "max_num_seqs"),
    [
        (8, SamplingParams(temperature=0, max_tokens=1), 2),
        (1, SamplingParams(n=4, max_tokens=1), 2),
    ],
)
def test_a_prefix_that_a_step_in_flight_computes_is_shared(
    model_dir: Path, number: int, params: SamplingParams, max_num_seqs: int
) -> None:
    """The next step is scheduled before the host has read that one."""
    prefix = [1 + i % 7 for i in range(40)]
    prompts = [[*prefix, 10 + i] for i in range(number)]
    counts = []
    for overlap in (True, False):
        options = dict(max_num_seqs=max_num_seqs, kvcache_block_size=4)
        with make_llm(model_dir, overlap=overlap, **options) as llm:
            llm.generate(prompts, params, use_tqdm=False)
            counts.append(llm.stats()["prefill_tokens"])
            audit_at_rest(llm)
    assert counts[0] == counts[1] < 60


def test_only_an_early_stop_computes_one_token_too_many(model_dir: Path) -> None:
    """An end by length costs none; EOS and stop tokens cost one for each sample."""
    with make_llm(model_dir, overlap=True) as llm:
        rows = count_rows(llm)
        params = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 2, 7, 9)
        ]
        llm.generate([[1, 2, 3]] * 4, params, use_tqdm=False)
        assert sum(rows) == 1 + 2 + 7 + 9
        (out,) = llm.generate([5, 6], params[3], use_tqdm=False)
        stop = out["token_ids"][4]
        length = out["token_ids"].index(stop) + 1
        rows.clear()
        params = [SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[stop])]
        (out,) = llm.generate([5, 6], params, use_tqdm=False)
        assert len(out["token_ids"]) == length
        assert sum(rows) == length + 1
        audit_at_rest(llm)


@pytest.mark.parametrize("overlap", [False, True])
def test_host_and_device_work_at_the_same_time(
    overlap: bool, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host launches a step before it waits for the one before; else they would take turns."""
    done: list[str] = []
    with make_llm(model_dir, overlap=overlap) as llm:
        draw = llm.model_runner.draw

        def launching(begun: Begun) -> Any:
            launched, number = draw(begun), done.count("launch")
            done.append("launch")
            wait = launched.wait

            def waiting() -> list[int]:
                done.append(f"wait for {number}")
                return wait()

            launched.wait = waiting  # type: ignore[method-assign]
            return launched

        monkeypatch.setattr(llm.model_runner, "draw", launching)
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        llm.generate([[1, 2]] * 2, params, use_tqdm=False)
    if overlap:
        order = [one for n in range(8) for one in ("launch", f"wait for {n}")]
        assert done == ["launch", *order, "wait for 8"]
    else:
        assert done == [one for n in range(9) for one in ("launch", f"wait for {n}")]


def test_a_step_in_flight_is_dropped_after_an_error(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens arrive after the sequences were restarted, and must not be appended."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with make_llm(model_dir, overlap=True) as llm:
        expected = llm.generate([7, 8, 9], params, use_tqdm=False)[0]["token_ids"]
        request_id = llm.add_request([7, 8, 9], params)
        for _ in range(4):
            llm.step()
        assert llm._launched is not None
        with monkeypatch.context() as patch:
            patch.setattr(llm.model_runner, "begin", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate([1], params, use_tqdm=False)
        outputs = []
        while not llm.is_finished():
            outputs += llm.step()
        assert [(o["request_id"], o["token_ids"]) for o in outputs] == [(request_id, expected)]
        audit_at_rest(llm)


@pytest.mark.parametrize(
    ("options", "waits"),
    [({}, False), ({"logprobs": 2}, False), ({"presence_penalty": 1.0}, True)],
)
def test_only_draws_that_read_tokens_wait_for_them(
    options: dict[str, Any], waits: bool, model_dir: Path
) -> None:
    """The forward pass of a step begins before the tokens of the last one are known."""
    with make_llm(model_dir, overlap=True) as llm:
        runner, order = llm.model_runner, list[str]()
        for name in ("begin", "draw", "wait"):
            method = getattr(runner, name)

            def noted(step: Any, name: str = name, method: Any = method) -> Any:
                order.append(name)
                return method(step)

            setattr(runner, name, noted)
        params = [
            SamplingParams(max_tokens=9, ignore_eos=True),
            SamplingParams(max_tokens=9, ignore_eos=True, **options),
        ]
        llm.generate([[1, 2], [3, 4]], params, use_tqdm=False)
        step = ["begin", "wait", "draw"] if waits else ["begin", "draw", "wait"]
        assert order == ["begin", "draw", *step * 8, "wait"]


def test_a_stream_reports_no_pending_tokens(model_dir: Path) -> None:
    """The placeholder of a token in flight is in no event."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=30, n=2, stop=["q", "zz"])
    with make_llm(model_dir, overlap=True, **SMALL_POOL) as llm:
        (out,) = llm.generate([[3, 4, 5]], params, use_tqdm=False)
        aborted: dict[int, list[int]] = {0: [], 1: []}
        for event in llm.stream([[3, 4, 5]], params):
            aborted[event["sample"]] += event["token_ids"]
        assert aborted == {one["index"]: one["token_ids"] for one in out["outputs"]}
        audit_at_rest(llm)


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, dict(scheduling="mixed"), dict(enforce_eager=True)])
def test_overlapping_steps_keep_outputs_on_a_device(
    options: dict[str, Any], model_dir: Path
) -> None:
    """Sampled tokens become inputs on the device, without the host."""
    prompts = [[index + 1] * (1 + 7 * index % 40) for index in range(30)]
    params = [
        SamplingParams(
            temperature=index % 3, seed=index, max_tokens=5 + index, n=1 + index % 2,
            stop_token_ids=range(20, 60) if index % 2 else None, logprobs=index % 2,
            prompt_logprobs=0 if index % 5 == 0 else None,
        )
        for index in range(30)
    ]  # fmt: skip
    results = []
    for overlap in (True, False):
        on_device = dict(device="cuda", num_kvcache_blocks=150, max_num_batched_tokens=64)
        with make_llm(model_dir, overlap=overlap, **on_device, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            results.append([[one["token_ids"] for one in out["outputs"]] for out in outputs])
            audit_at_rest(llm)
    same = sum(one == other for one, other in zip(*results, strict=True))
    assert same >= 28, "near-ties are rare in float32"


def test_the_device_table_has_more_buffers_than_steps_are_in_flight(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer with a step's changes is used again when the device has read it."""
    with make_llm(model_dir, overlap=True, **SMALL_POOL) as llm:
        begin, wait, counts = llm.model_runner.begin, llm.model_runner.wait, [0]

        def begun(batch: Batch) -> Begun:
            counts.append(counts[-1] + 1)
            return begin(batch)

        def waited(step: Launched) -> list[int]:
            counts.append(counts[-1] - 1)
            return wait(step)

        monkeypatch.setattr(llm.model_runner, "begin", begun)
        monkeypatch.setattr(llm.model_runner, "wait", waited)
        llm.generate([[1, 2, 3]] * 9, SamplingParams(max_tokens=20, ignore_eos=True))
        assert max(counts) == 2 < BUFFERS
