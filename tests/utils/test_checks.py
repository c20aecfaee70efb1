"""Errors show the beginning of a value, and read no more of it."""

from typing import Any

import pytest

from nanovllm.utils.checks import shorten
from nanovllm.utils.json_text import shorten_json


class Name(str):
    """A name that counts how often it is compared or written."""

    uses = 0
    __hash__ = str.__hash__

    def __lt__(self, other: str) -> bool:
        Name.uses += 1
        return str(self) < str(other)

    def __repr__(self) -> str:
        Name.uses += 1
        return str.__repr__(self)


@pytest.mark.parametrize("show", [shorten, shorten_json])
def test_few_names_of_a_large_dict_are_read(show: Any) -> None:
    Name.uses = 0
    value: Any = {Name(number): [number] * 1000 for number in range(10_000)}
    text = show([value] * 1000)
    assert "..." in text and len(text) < 1000 and Name.uses < 500
    assert show({"b": 1, "a": [2]}) in ("{'a': [2], 'b': 1}", '{"a": [2], "b": 1}')
