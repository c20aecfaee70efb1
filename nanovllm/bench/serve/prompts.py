"""The requests of a run: random prompts, or the lines of a file."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.bench.serve.options import CHAT, ServerLoad
from nanovllm.utils.checks import check_int, check_name, shorten
from nanovllm.utils.json_text import parse_json

DATASET_FIELDS = ("prompt", "messages", "max_tokens")
# Common words; each is one token of most tokenizers.
TEXT = """\
the of and to in is that it was for on are as with his they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about how up out them
then she many some so these would other into has more her two like him see time could no make than
first been its who now people my made over did down only way find use may water long little very
after words called just where most know get through back much before go good new write our me man
too any day same right look think also around another came come work three must because does part
even place well such here take why help put different away again off went old number great tell
men say small every found still between name should home big give air line set own under read last
never us left end along while might next sound below saw something thought both few those always
show large often together asked house world going want school important until form food keep"""
WORDS = TEXT.split()


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of random prompts: token ids, or words if there are none."""

    ids: Sequence[int] = ()
    tokens_per_word: float = 1.0


class RandomPrompts:
    """Draws requests with random prompts; the same requests for the same seed."""

    def __init__(self, load: ServerLoad, vocabulary: Vocabulary) -> None:
        self._load, self._vocabulary = load, vocabulary
        self._rng = random.Random(load.seed)

    def draw(self) -> dict[str, Any]:
        """The input and the length of one request, as fields of its body."""
        load, vocabulary = self._load, self._vocabulary
        length, output_len = self._length(load.input_len), self._length(load.output_len)
        if vocabulary.ids and load.endpoint != CHAT:
            return with_length(
                load, {"prompt": self._rng.choices(vocabulary.ids, k=length)}, output_len
            )
        num_words = max(1, round(length / vocabulary.tokens_per_word))
        text = " ".join(self._rng.choices(WORDS, k=num_words))
        return with_length(load, _text_input(load, text), output_len)

    def _length(self, length: int) -> int:
        ratio = self._load.range_ratio
        low, high = round(length * (1 - ratio)), round(length * (1 + ratio))
        return self._rng.randint(max(1, low), max(1, high))


def read_dataset(path: Path, load: ServerLoad) -> list[dict[str, Any]]:
    """The requests of a JSON Lines file, from its beginning and as often as they are needed.

    A line has a `prompt` or `messages`, and may have `max_tokens`.
    """
    requests = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                requests.append(_read_line(f"{path}, line {number}", line, load))
    if not requests:
        raise ValueError(f"{path} has no lines")
    wanted = load.num_prompts or len(requests)
    return list(itertools.islice(itertools.cycle(requests), wanted))


def with_length(load: ServerLoad, fields: Mapping[str, Any], output_len: int) -> dict[str, Any]:
    """Add the most tokens to generate to a body's fields, by the endpoint's name for it."""
    name = "max_completion_tokens" if load.endpoint == CHAT else "max_tokens"
    return {**fields, name: output_len}


def _read_line(place: str, line: str, load: ServerLoad) -> dict[str, Any]:
    """The fields of one request; a ValueError names the line."""
    try:
        value = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{place}: must be a JSON object, got {shorten(value)}")
    for name in value:
        check_name(name, DATASET_FIELDS, f"{place}: ")
    prompt, messages = value.get("prompt"), value.get("messages")
    if (prompt is None) == (messages is None):
        raise ValueError(f"{place}: must have either a prompt or messages")
    output_len = value.get("max_tokens", load.output_len)
    try:
        check_int("max_tokens", output_len, 1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: {error}") from None
    return with_length(load, _line_input(place, prompt, messages, load), output_len)


def _line_input(place: str, prompt: Any, messages: Any, load: ServerLoad) -> dict[str, Any]:
    if isinstance(messages, list):
        if load.endpoint != CHAT:
            raise ValueError(f"{place}: messages need --endpoint chat")
        return {"messages": messages}
    if isinstance(prompt, str):
        return _text_input(load, prompt)
    if isinstance(prompt, list):
        if load.endpoint == CHAT:
            raise ValueError(f"{place}: a prompt of token ids needs --endpoint completions")
        return {"prompt": prompt}
    allowed = "a text or a list of token ids" if messages is None else "a list"
    name, value = ("prompt", prompt) if messages is None else ("messages", messages)
    raise ValueError(f"{place}: {name} must be {allowed}, got {shorten(value)}")


def _text_input(load: ServerLoad, text: str) -> dict[str, Any]:
    if load.endpoint == CHAT:
        return {"messages": [{"role": "user", "content": text}]}
    return {"prompt": text}
