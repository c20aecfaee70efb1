"""What StructuredOutputs takes for a schema and a choice: types of Python, and errors of others."""

import enum
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pytest
from typing_extensions import TypedDict

import nanovllm
from nanovllm import SamplingParams, StructuredOutputs, sampling_params
from nanovllm.utils.closed_schemas import closed


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"
    ROT = "red"  # noqa: PIE796 (another name of the first)


class Tone(str, enum.Enum):
    CALM = "calm"
    LOUD = "loud"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


@dataclass
class Point:
    x: int
    color: Color


class Pair(TypedDict):
    a: int
    b: str


class Triple(NamedTuple):
    a: int
    b: str


class Person(pydantic.BaseModel):
    name: str


TYPES: dict[str, Any] = {
    "dataclass": Point,
    "TypedDict": Pair,
    "NamedTuple": Triple,
    "Enum": Color,
    "IntEnum": Size,
    "Literal": Literal["a", 2, None],
    "list": list[Person],
    "union": Person | None,
    "Annotated": Annotated[int, pydantic.Field(ge=3)],
    "int": int,
}


@pytest.mark.parametrize("name", TYPES)
def test_a_type_is_a_schema_as_pydantic_describes_it(name: str) -> None:
    kind = TYPES[name]
    adapter = pydantic.TypeAdapter(kind)
    expected = closed(adapter.json_schema())
    for given in (kind, adapter):
        assert json.loads(StructuredOutputs(json=given).json) == expected


def test_a_model_is_a_schema() -> None:
    assert json.loads(StructuredOutputs(json=Person).json) == closed(Person.model_json_schema())


@pytest.mark.parametrize("kind", [Callable[[int], int], type(nanovllm), Person.__init__])
def test_a_type_without_a_schema_is_an_error(kind: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^json must be a JSON schema as a dict or a text, or a py"
    ):
        StructuredOutputs(json=kind)


def test_a_model_without_a_schema_is_an_error() -> None:
    class Odd(pydantic.BaseModel):
        call: Callable[[int], int]

    with pytest.raises(TypeError, match=r"^json must be .*Odd.*: Cannot generate a JsonSchema"):
        StructuredOutputs(json=Odd)


def test_types_need_pydantic_and_nothing_else_does() -> None:
    script = """
import dataclasses, enum, sys
from nanovllm import StructuredOutputs
sys.modules["pydantic"] = None
Color = enum.Enum("Color", {"RED": "red"})
Point = dataclasses.make_dataclass("Point", [("x", int)])
assert StructuredOutputs(choice=Color).choice == ("red",)
StructuredOutputs(json={"type": "object"}), StructuredOutputs(json="{}")
try:
    StructuredOutputs(json=Point)
except TypeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.startswith("json: pydantic, which makes a schema of ")
    assert "is not installed" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("choice", "texts"),
    [
        (Color, ("red", "green")),
        (Tone, ("calm", "loud")),
        (list(Tone), ("calm", "loud")),
        ([Color.GREEN, "blue"], ("green", "blue")),
        (Literal["a", "b"], ("a", "b")),
        ({"a": 1, "b": 2}.keys(), ("a", "b")),
        ((text for text in "ab"), ("a", "b")),
    ],
)
def test_a_choice_may_be_an_enum(choice: Any, texts: tuple[str, ...]) -> None:
    found = StructuredOutputs(choice=choice).choice
    assert found == texts
    assert {type(text) for text in found} == {str}


@pytest.mark.parametrize("choice", [Size, Literal["a", 1], [Size.SMALL], str, "ab", {"a": 1}, 3])
def test_a_choice_of_others_is_an_error(choice: Any) -> None:
    with pytest.raises(TypeError, match=r"^choice must be a list of texts, got "):
        StructuredOutputs(choice=choice)


def test_the_name_of_vllm_is_the_same_class() -> None:
    assert nanovllm.StructuredOutputsParams is StructuredOutputs
    assert sampling_params.StructuredOutputsParams is StructuredOutputs
    params = SamplingParams(structured_outputs=nanovllm.StructuredOutputsParams(regex="a"))
    assert params == SamplingParams(structured_outputs=dict(regex="a"))


@pytest.mark.parametrize(
    "given",
    [
        dict(json={"enum": ["\ud800"]}),
        dict(json='{"enum": ["\\ud800"]}'),
        dict(json={"properties": {"\udfff": {}}}),
        dict(structural_tag={"triggers": ["\ud800"], "structures": []}),
        dict(choice=["a", "\ud800"]),
        dict(regex="\ud800"),
        dict(grammar='start: "\ud800"'),
        dict(json={}, whitespace_pattern="\ud800"),
        dict(regex="a", after="\ud800"),
    ],
)
def test_half_a_character_is_an_error(given: dict[str, Any]) -> None:
    name = [*given][-1]
    with pytest.raises(ValueError, match=f"^{name} is not valid Unicode text: "):
        StructuredOutputs(**given)


def test_equal_names_are_an_error_however_they_are_given() -> None:
    for schema in ('{"type": "object", "type": "array"}', {"properties": {1: {}, "1": {}}}):
        with pytest.raises(ValueError, match=r"^json is not valid JSON: .* occurs twice; got ."):
            StructuredOutputs(json=schema)


def test_a_marker_has_few_bytes() -> None:
    assert StructuredOutputs(regex="a", after="é" * 128).after == "é" * 128
    with pytest.raises(ValueError, match=r"^after must have at most 256 bytes, got 258$"):
        StructuredOutputs(regex="a", after="é" * 129)
    with pytest.raises(ValueError, match=r"structured_outputs: after must have at most 256 bytes"):
        SamplingParams(structured_outputs=dict(regex="a", after="a" * 160_000))


class Open(pydantic.BaseModel, extra="allow"):
    inner: Person
    numbers: dict[str, int]


def test_objects_of_types_are_closed_unless_the_type_says_otherwise() -> None:
    """A model adds names of its own at high temperatures, which pydantic then drops."""
    for kind in (Point, Pair, Person, list[Person], pydantic.TypeAdapter(Person)):
        assert '"additionalProperties":false' in StructuredOutputs(json=kind).json
    schema = json.loads(StructuredOutputs(json=Open).json)
    assert schema["additionalProperties"] is True
    assert schema["properties"]["numbers"]["additionalProperties"] == {"type": "integer"}
    assert schema["$defs"]["Person"]["additionalProperties"] is False


def test_an_option_closes_the_objects_of_any_schema() -> None:
    inner = {"properties": {"properties": {"const": {"properties": {}}}}}
    schema = {"anyOf": [inner, {"type": "object"}], "$defs": {"a": {**inner, "title": "A"}}}
    assert json.loads(StructuredOutputs(json=schema).json) == schema
    asked = StructuredOutputs(json=schema, disable_additional_properties=True)
    shut = {**inner, "additionalProperties": False}
    assert json.loads(asked.json) == {
        "anyOf": [shut, {"type": "object"}], "$defs": {"a": {**shut, "title": "A"}},
    }  # fmt: skip
    with pytest.raises(ValueError, match="disable_additional_properties is for json, not regex"):
        StructuredOutputs(regex="a", disable_additional_properties=True)
