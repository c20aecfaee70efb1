"""The description of an application as OpenAPI 3.1, made from its routes: none is missing."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.routing import BaseRoute, Route

from nanovllm import __version__
from nanovllm.server.described.bodies import BODIES, Body
from nanovllm.server.described.fields import COMPONENTS, Schema, field_schemas
from nanovllm.server.guard import OPEN_PATHS
from nanovllm.server.messages.errors import KEY_HEADER, has_own_errors

ANY_OBJECT = {"type": "object"}
KEY, OWN_KEY = "key", "key_header"  # either of them is enough
SCHEMES = {
    KEY: {"type": "http", "scheme": "bearer"},
    OWN_KEY: {"type": "apiKey", "in": "header", "name": KEY_HEADER},
}


def openapi(
    routes: Iterable[BaseRoute], needs_key: bool, limits: Mapping[str, Schema]
) -> dict[str, Any]:
    """The description of these routes; `limits` are keywords of fields, for this server."""
    schemas: dict[str, Any] = dict(COMPONENTS)
    paths: dict[str, Any] = {}
    for route in routes:
        if isinstance(route, Route):
            path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
            methods = sorted((route.methods or set()) - {"HEAD"})
            paths.setdefault(path, {}).update(
                {
                    method.lower(): _operation(route, method, schemas, needs_key, limits)
                    for method in methods
                }
            )
    components: dict[str, Any] = {"schemas": schemas}
    if needs_key:
        components["securitySchemes"] = SCHEMES
    return {
        "openapi": "3.1.0",
        "info": {"title": "nanovllm", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _operation(
    route: Route,
    method: str,
    schemas: dict[str, Any],
    needs_key: bool,
    limits: Mapping[str, Schema],
) -> dict[str, Any]:
    """What one method of a path does; the schema of its body joins `schemas`."""
    body = BODIES.get(route.path)
    name = "_".join(re.findall(r"\w+", route.path.partition("{")[0])) or "page"
    in_path = re.findall(r"{(\w+)", route.path)
    found: dict[str, Any] = {
        "operationId": "_".join([method.lower(), name, *in_path]),
        "summary": (body.says if body else _first_line(route)).rstrip("."),
        "responses": _responses(body, route.path),
    }
    parameters = [
        {"name": one, "in": "path", "required": True, "schema": {"type": "string"}}
        for one in in_path
    ] + [
        {"name": one, "in": "query", "schema": {"type": "string"}}
        for one in (body.query if body else ())
    ]
    if parameters:
        found["parameters"] = parameters
    if method == "POST" and body is not None and body.names:
        schemas[name] = schema_of(body, limits)
        found["requestBody"] = _content({"$ref": f"#/components/schemas/{name}"}) | {
            "required": True
        }
    elif method == "POST" and body is None and route.path not in OPEN_PATHS:
        found["requestBody"] = _content(ANY_OBJECT)
    if needs_key and route.path not in OPEN_PATHS:
        found["security"] = [{KEY: []}, {OWN_KEY: []}]
    return found


def schema_of(body: Body, limits: Mapping[str, Schema]) -> dict[str, Any]:
    """The schema of a body; other fields are errors."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": field_schemas(body, limits),
        "additionalProperties": False,
    }
    return schema | ({"required": list(body.required)} if body.required else {})


def _responses(body: Body | None, path: str) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "success"}
    if body is not None and body.names:
        good |= _content(ANY_OBJECT)
        if body.streams:
            good["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    name = "MessagesError" if has_own_errors(path) else "Error"
    error = {"description": "an error"} | _content({"$ref": f"#/components/schemas/{name}"})
    return {"200": good, "default": error}


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _first_line(route: Route) -> str:
    """What the endpoint's own description begins with."""
    return (route.endpoint.__doc__ or "").strip().partition("\n")[0]
