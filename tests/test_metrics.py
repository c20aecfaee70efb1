"""Metrics by vLLM's names: counted by hand, and with the same values as `stats` and outputs."""

from pathlib import Path

import pytest
from reference import make_llm

from nanovllm import LLM, SamplingParams
from nanovllm.engine.requests.measures import Measured, RequestMeter
from nanovllm.engine.requests.statistics import histogram, request_metrics
from nanovllm.metrics import Counter, Gauge, Histogram, Vector
from nanovllm.outputs import RequestMetrics

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def by_name(llm: LLM) -> dict[str, object]:
    """Each metric's value by its name without the prefix; those of a reason by both."""
    found: dict[str, object] = {}
    for metric in llm.get_metrics():
        assert metric.name.startswith("vllm:")
        assert metric.labels["model_name"] == llm.config.model
        name = ":".join([metric.name[5:], *filter(None, [metric.labels.get("finished_reason")])])
        assert name not in found
        found[name] = getattr(metric, "value", metric)
    return found


def test_buckets_count_what_is_at_most_their_key() -> None:
    measured = Measured((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 5.0, 6.0, None):
        measured.add(value)
    assert histogram(measured, "x", {}) == Histogram(
        "x", {}, count=5, sum=14.0, buckets={"1.0": 2, "2.0": 3, "5.0": 4, "+Inf": 5}
    )


def test_a_meter_counts_samples_and_leaves_out_what_did_not_happen() -> None:
    meter = RequestMeter()
    times = RequestMetrics(
        queue_time=0.5, time_to_first_token=None, time_per_output_token=None, end_to_end_time=2.0
    )
    meter.add(times, 7, [(3, "stop"), (4, "abort")])
    assert (meter.prompt_tokens.sum, meter.generated_tokens.sum) == (7, 7)
    assert sum(meter.first_token.counts) == 0
    assert meter.reasons == {"stop": 1, "length": 0, "abort": 1, "error": 0}


def test_generated_tokens_never_fall(model_dir: Path) -> None:
    """A sequence whose last token is taken back has one less."""
    meter = RequestMeter()
    with make_llm(model_dir) as llm:
        stats = llm.stats()

    def generated(running_tokens: int) -> int:
        metrics = request_metrics(meter, stats, running_tokens, "a model")
        return next(m.value for m in metrics if m.name == "vllm:generation_tokens")

    assert [generated(tokens) for tokens in (0, 5, 4, 5, 6)] == [0, 5, 5, 5, 6]
    times = RequestMetrics(
        queue_time=None, time_to_first_token=None, time_per_output_token=None, end_to_end_time=None
    )
    meter.add(times, 1, [(6, "stop")])
    assert [generated(tokens) for tokens in (0, 3)] == [6, 9]


def test_metrics_of_finished_running_and_aborted_requests(model_dir: Path) -> None:
    with make_llm(model_dir, kvcache_block_size=4, num_kvcache_blocks=100) as llm:
        before = by_name(llm)
        assert before["request_success:length"] == before["prompt_tokens"] == 0
        (output,) = llm.generate([1] * 9, GREEDY, use_tqdm=False)
        llm.add_request([1] * 9, GREEDY)
        waiting = llm.add_request([5], GREEDY)
        found = by_name(llm)
        assert (found["num_requests_running"], found["num_requests_waiting"]) == (0, 2)
        llm.step()
        found = by_name(llm)
        assert found["num_requests_running"] == 2
        assert found["kv_cache_usage_perc"] == llm.stats().blocks_used / 100 == 0.04
        assert found["prompt_tokens"] == 9, "of finished ones"
        assert found["generation_tokens"] == 8 + 2, "as they come"
        first = found["time_to_first_token_seconds"]
        assert isinstance(first, Histogram) and first.count == 3, "of running ones, too"
        assert (found["prefix_cache_queries"], found["prefix_cache_hits"]) == (19, 8)
        llm.abort_request(waiting)
        while not llm.is_finished():
            llm.step()
        found = by_name(llm)
    assert (found["prompt_tokens"], found["generation_tokens"]) == (9 + 9 + 1, 8 + 8 + 1)
    assert found["request_success:length"] == 2
    assert found["request_success:abort"] == 1
    first = found["time_to_first_token_seconds"]
    assert isinstance(first, Histogram)
    assert first.count == 3, "each once"
    assert first.sum > output.metrics.time_to_first_token > 0


def test_requests_that_an_interrupt_ends_are_aborted(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the metrics as in `stats`, with the tokens that they had."""

    def interrupted() -> None:
        advance()
        if llm.counter.decode_tokens:
            raise KeyboardInterrupt

    with make_llm(model_dir, overlap=True) as llm:
        advance = llm.advance
        monkeypatch.setattr(llm, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2], [3, 4]], GREEDY, use_tqdm=False)
        monkeypatch.undo()
        found = by_name(llm)
        assert found["request_success:abort"] == llm.stats().num_aborted == 2
        assert (found["prompt_tokens"], found["generation_tokens"]) == (4, 4)
        llm.generate([1, 2], GREEDY, use_tqdm=False)
        assert by_name(llm)["request_success:length"] == llm.stats().num_finished == 1


def test_drafts_are_counted_by_vllms_names(model_dir: Path) -> None:
    """Without the option there are none of these."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    with make_llm(model_dir) as llm:
        assert not any("spec_decode" in metric.name for metric in llm.get_metrics())
    with make_llm(model_dir, speculative_config=ngram) as llm:
        params = SamplingParams(
            temperature=0, max_tokens=40, allowed_token_ids=[7], ignore_eos=True
        )
        llm.generate([7], params, use_tqdm=False)
        found, stats = by_name(llm), llm.stats()
        (places,) = [m for m in llm.get_metrics() if isinstance(m, Vector)]
    assert found["spec_decode_num_draft_tokens"] == stats.drafted_tokens > 20
    assert found["spec_decode_num_accepted_tokens"] == stats.accepted_tokens == sum(places.values)
    assert found["spec_decode_num_drafts"] == places.values[0] > 5, "a constant text is guessed"
    assert len(places.values) == 3 and places.values == sorted(places.values, reverse=True)
    assert places.name == "vllm:spec_decode_num_accepted_tokens_per_pos"


def test_the_kinds_are_vllms(model_dir: Path) -> None:
    with make_llm(model_dir) as llm:
        kinds = {metric.name: type(metric) for metric in llm.get_metrics()}
    assert kinds["vllm:kv_cache_usage_perc"] is Gauge
    assert kinds["vllm:num_preemptions"] is Counter
    assert kinds["vllm:e2e_request_latency_seconds"] is Histogram
