"""vLLM's older fields for constraints: `guided_json`, `guided_regex` and others."""

from collections.abc import Mapping
from typing import Any

from nanovllm.structured_outputs import StructuredOutputs
from nanovllm.utils.json_text import check_json_bool

KINDS = ("json", "regex", "choice", "grammar", "json_object")
GUIDED = (*(f"guided_{kind}" for kind in KINDS), "guided_whitespace_pattern")
OWN = "structured_outputs"


def constraint_field(body: Mapping[str, Any]) -> str:
    """The field of a body that constrains the answer, for errors about what it asks for."""
    return next((name for name in (OWN, "response_format", *GUIDED) if name in body), OWN)


def guided_outputs(body: Mapping[str, Any]) -> StructuredOutputs | None:
    """The constraint that such fields ask for: each is the option of this name without `guided_`.

    None if there are none. `structured_outputs` and `response_format` may not be given with them.
    """
    given = {name: body[name] for name in GUIDED if name in body}
    if "guided_json_object" in given:
        name = "guided_json_object"
        if not check_json_bool(name, given[name]):
            del given[name]
    if not given:
        return None
    for other in (OWN, "response_format"):
        if other in body:
            raise ValueError(f"give one of {next(iter(given))} and {other}")
    try:
        return StructuredOutputs(**{name.removeprefix("guided_"): given[name] for name in given})
    except (TypeError, ValueError) as error:
        raise type(error)(f"{', '.join(given)}: {error}") from None
