"""The description of the server as a page: plain HTML, without scripts or files of others."""

from collections.abc import Mapping
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } summary { cursor: pointer; padding: .3rem 0; }
code, summary b { font-family: ui-monospace, Consolas, monospace; font-size: .92em; }
summary span { opacity: .75; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; }
td { border-top: 1px solid #8884; overflow-wrap: break-word; }
@media (max-width: 40rem) {
  th { display: none; } tr { display: block; padding: .3rem 0; border-top: 1px solid #8884; }
  td { display: block; padding: 0; border: 0; }
}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def docs_page(document: Mapping[str, Any]) -> str:
    """The page of a description: a part for each method of each path, closed at first."""
    parts = [
        _part(document, path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    info = document["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>"
        '<p>What this server answers; <a href="openapi.json">openapi.json</a> has the same for'
        ' programs, and <a href="./">the page</a> is for chats. A field in bold must be given; in'
        " others null is as good as nothing.</p>"
        f"{''.join(parts)}</body></html>\n"
    )


def _part(document: Mapping[str, Any], path: str, method: str, operation: Mapping[str, Any]) -> str:
    head = (
        f"<summary><b>{method.upper()} {escape(path)}</b>"
        f" <span>{escape(operation['summary'])}</span></summary>"
    )
    rows = [
        (parameter["name"], parameter["schema"], parameter.get("required", False))
        for parameter in operation.get("parameters", ())
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = _resolved(document, body.get("schema", {}))
    required = schema.get("required", ())
    rows += [(name, one, name in required) for name, one in schema.get("properties", {}).items()]
    cells = "".join(
        f"<tr><td>{'<b>' if must else ''}<code>{escape(name)}</code>{'</b>' if must else ''}</td>"
        f"<td>{escape(_type(document, one))}</td><td>{escape(_says(document, one))}</td></tr>"
        for name, one, must in rows
    )
    table = f"<table><tr><th>field</th><th>type</th><th></th></tr>{cells}</table>" if rows else ""
    return f"<details>{head}{table}</details>"


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema, or the one that it refers to."""
    name = schema.get("$ref", "").rpartition("/")[2]
    found: Mapping[str, Any] = document["components"]["schemas"][name] if name else schema
    return found


def _says(document: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    return str(_resolved(document, schema).get("description", ""))


def _type(document: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """A type in few words."""
    schema = _resolved(document, schema)
    if "enum" in schema:
        return " | ".join("null" if one is None else str(one) for one in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_type(document, one) for one in schema["anyOf"]))
    kinds = schema.get("type", "any")
    return " | ".join(
        f"list of {_type(document, schema['items'])}" if kind == "array" and "items" in schema
        else str(kind)
        for kind in ([kinds] if isinstance(kinds, str) else kinds)
        if kind != "null"
    )  # fmt: skip
