"""Parse a line of a batch: OpenAI's batch format, or a plain line with the fields of the body.

It knows no engine, and leaves the body to nanovllm.openai.request.
"""

from collections.abc import Mapping
from typing import Any

from nanovllm.openai.request import CHAT, COMPLETIONS, APIRequest, parse_body
from nanovllm.openai.vectors import EMBEDDINGS, VectorRequest, parse_embeddings
from nanovllm.utils.checks import check_choice, check_name, shorten
from nanovllm.utils.json_text import parse_json

URLS = (CHAT, COMPLETIONS, EMBEDDINGS)
ENVELOPE = ("custom_id", "method", "url", "body")


def parse_line(data: bytes | None) -> dict[str, Any]:
    """Parse a line as a JSON object; None stands for a line that is too long."""
    if data is None:
        raise ValueError("the line is too long")
    try:
        value = parse_json(data.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not valid UTF-8: {error}") from None
    except ValueError as error:
        raise ValueError(f"the line is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise TypeError(f"a line must be a JSON object, got {shorten(value)}")
    return value


def custom_id_of(line: Mapping[str, Any]) -> str | None:
    """A line's own id, or None if it has none."""
    custom_id = line.get("custom_id")
    if custom_id is not None and not isinstance(custom_id, str):
        raise TypeError(f"custom_id must be a text, got {shorten(custom_id)}")
    return custom_id


def parse_request(
    line: Mapping[str, Any], defaults: Mapping[str, Any]
) -> APIRequest | VectorRequest:
    """Parse a line's request; `defaults` are sampling parameters for lines without them."""
    url, body = _open_envelope(line)
    if url == EMBEDDINGS:
        return parse_embeddings(body)
    request = parse_body(url, body, defaults)
    if request.streams:
        raise ValueError("stream must be False here, got True: a job writes whole answers")
    if request.beams is not None:
        raise ValueError("use_beam_search must be False here, got True; see LLM.beam_search")
    if len(request.prompts) != 1:
        raise ValueError("prompt must be one text or one list of token ids, got a list of them")
    return request


def _open_envelope(line: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The endpoint and the body of a line."""
    if not line.keys() & {"method", "url", "body"}:
        return _plain(line)
    for name in line:
        check_name(name, ENVELOPE)
    for name in ENVELOPE:
        if line.get(name) is None:
            raise ValueError(f"{name} is missing")
    if line["method"] != "POST":
        raise ValueError(f"method must be 'POST', got {shorten(line['method'])}")
    check_choice("url", line["url"], URLS)
    if not isinstance(line["body"], dict):
        raise TypeError(f"body must be an object, got {shorten(line['body'])}")
    return line["url"], line["body"]


def _plain(line: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The endpoint and the body of a line without an envelope: a prompt makes it a completion."""
    body = {name: value for name, value in line.items() if name != "custom_id"}
    if ("prompt" in body) == ("messages" in body):
        not_both = "and not both, " if "prompt" in body else ""
        raise ValueError(
            f"a line must have a prompt or messages, {not_both}or else method, url and body"
        )
    return (CHAT if "messages" in body else COMPLETIONS), body
