"""Which requests are sent, and when."""

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from nanovllm.bench.serve.arrivals import arrival_times
from nanovllm.bench.serve.options import ServerLoad
from nanovllm.bench.serve.prompts import RandomPrompts, Vocabulary, read_dataset


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def test_without_a_rate_all_are_sent_at_once() -> None:
    assert arrival_times(ServerLoad(), 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("burstiness", "spread"), [(0.25, 2.0), (1.0, 1.0), (16.0, 0.25)])
def test_the_times_between_requests_follow_the_gamma_distribution(
    burstiness: float, spread: float
) -> None:
    """Its standard deviation is the mean divided by the root of the shape; the seed is fixed."""
    times = arrival_times(ServerLoad(request_rate=4, burstiness=burstiness), 10_001)
    assert times[0] == 0.0 and times == sorted(times)
    assert times[-1] == pytest.approx(2500), "the rate is exactly what was asked for"
    assert statistics.stdev(gaps(times)) * 4 == pytest.approx(spread, rel=0.08)


def test_times_depend_on_the_seed_alone() -> None:
    one, same, other = (arrival_times(ServerLoad(request_rate=4, seed=s), 9) for s in (1, 1, 2))
    assert one == same != other


def test_a_single_request_is_sent_at_once() -> None:
    assert arrival_times(ServerLoad(request_rate=0.1), 1) == [0.0]


def test_random_ids_have_the_asked_lengths() -> None:
    prompts = RandomPrompts(
        ServerLoad(input_len=40, output_len=20, range_ratio=0.5), Vocabulary([3, 5])
    )
    drawn = [prompts.draw() for _ in range(400)]
    assert {token for fields in drawn for token in fields["prompt"]} == {3, 5}
    lengths = [len(fields["prompt"]) for fields in drawn]
    assert (min(lengths), max(lengths)) == (20, 60)
    outputs = [fields["max_tokens"] for fields in drawn]
    assert (min(outputs), max(outputs)) == (10, 30)


def test_lengths_are_at_least_one() -> None:
    prompts = RandomPrompts(ServerLoad(input_len=1, output_len=1, range_ratio=1), Vocabulary([3]))
    drawn = [prompts.draw() for _ in range(50)]
    assert {len(fields["prompt"]) for fields in drawn} == {1, 2}
    assert {fields["max_tokens"] for fields in drawn} == {1, 2}


def test_random_prompts_depend_on_the_seed() -> None:
    def drawn(seed: int) -> Any:
        return RandomPrompts(ServerLoad(seed=seed), Vocabulary(range(100))).draw()

    assert drawn(1) == drawn(1) != drawn(2)


def test_a_chat_gets_words() -> None:
    """As many as make the asked number of tokens."""
    load = ServerLoad(input_len=40, endpoint="chat")
    fields = RandomPrompts(load, Vocabulary([3], tokens_per_word=2.0)).draw()
    (message,) = fields["messages"]
    assert message["role"] == "user" and len(message["content"].split()) == 20
    assert fields["max_completion_tokens"] == 128


def dataset(path: Path, *lines: Any, **load: Any) -> list[dict[str, Any]]:
    file = path / "d.jsonl"
    file.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return read_dataset(file, ServerLoad(**load))


def test_a_dataset_has_prompts_and_lengths(tmp_path: Path) -> None:
    lines = ({"prompt": "a"}, "", {"prompt": [1, 2], "max_tokens": 5})
    assert dataset(tmp_path, *lines) == [
        {"prompt": "a", "max_tokens": 128}, {"prompt": [1, 2], "max_tokens": 5},
    ]  # fmt: skip
    cut = dataset(tmp_path, *lines, num_prompts=3, output_len=9)
    assert [fields["prompt"] for fields in cut] == ["a", [1, 2], "a"], "it is used again"
    assert len(dataset(tmp_path, *lines, num_prompts=1)) == 1


def test_a_dataset_for_chats_has_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
    found = dataset(tmp_path, {"messages": messages}, {"prompt": "b"}, endpoint="chat")
    assert [fields["messages"] for fields in found] == [
        messages, [{"role": "user", "content": "b"}],
    ]  # fmt: skip
    assert found[0]["max_completion_tokens"] == 128


@pytest.mark.parametrize(
    ("line", "endpoint", "words"),
    [
        ("{", "chat", "d.jsonl, line 2: Expecting"),
        ("[1]", "chat", "line 2: must be a JSON object, got [1]"),
        ({"prompt": "a", "prompts": 1}, "chat", "unknown field 'prompts'; did you mean 'prompt'?"),
        ({"max_tokens": 5}, "chat", "must have either a prompt or messages"),
        ({"prompt": "a", "messages": []}, "chat", "must have either a prompt or messages"),
        ({"prompt": "a", "max_tokens": 0}, "chat", "line 2: max_tokens must be >= 1, got 0"),
        ({"prompt": 5}, "chat", "prompt must be a text or a list of token ids, got 5"),
        ({"messages": "a"}, "chat", "messages must be a list, got 'a'"),
        ({"messages": []}, "completions", "line 2: messages need --endpoint chat"),
        ({"prompt": [1]}, "chat", "a prompt of token ids needs --endpoint completions"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, endpoint: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        dataset(tmp_path, {"prompt": "a"}, line, endpoint=endpoint)
    assert words in str(caught.value)


def test_an_empty_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no lines"):
        dataset(tmp_path, "")
