"""Renders docs/rest.md from the OpenAPI description of the service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

Json = Mapping[str, Any]

INTRODUCTION = """# REST API

<!-- Written by `make docs` from the OpenAPI description; edit the endpoints and their schemas. -->

For authors of a client: every call of the service with its parameters, body and answers. A running service has the
same description at `/openapi.json`, and at `/api/v1/docs` a page that sends requests.
[The job service](service.md#by-http) explains the conventions and has examples for `curl`; the Python client is
`gxpo_client.client.Client` ([example](tutorials/notebook.md)).

Requests carry `Authorization: Bearer TOKEN`. Errors are problem details (RFC 9457) of the form
[ProblemDetails](#problemdetails). Beside the answers named below, any call may be answered with 401 (no valid token),
403 (the token's role is too low), 404 (nothing of that id), 422 (an invalid request, a body that is not
JSON, or an unknown query parameter of a list of runs, groups, tokens or the audit, of metrics, a comparison or an
export) or 503 (unavailable); a call with a body also with 400, 408 or 413.
"""
USUAL = frozenset({"400", "401", "403", "404", "408", "413", "422", "503"})


def render_page(description: Json) -> str:
    """The whole page as Markdown. description: the OpenAPI object."""
    schemas: Json = description["components"]["schemas"]
    calls = list(_calls(description))
    known = [tag["name"] for tag in description["tags"]]
    tags = known + sorted({call["tags"][0] for _, call in calls} - set(known))
    about = {tag["name"]: tag["description"] for tag in description["tags"]}
    text = [INTRODUCTION]
    for tag in tags:
        text.append(f"\n## {tag.capitalize()}\n")
        if tag in about:
            text.append(f"\n{about[tag]}\n")
        text += [_call(title, call) for title, call in calls if call["tags"][0] == tag]
    text.append("\n## Schemas\n\nObjects in bodies and answers; a member marked * is always present.\n")
    text += [_schema(name, schemas[name]) for name in sorted(schemas)]
    return "".join(text)


def _calls(description: Json) -> Iterator[tuple[str, Json]]:
    for path, operations in description["paths"].items():
        for method, call in operations.items():
            yield f"{method.upper()} {path}", call


def _call(title: str, call: Json) -> str:
    words = [
        f"\n### {title} {{ #{call['operationId']} }}\n\n**{call['summary']}.** {_flat(call.get('description', ''))}\n"
    ]
    parameters = [one for one in call.get("parameters", []) if one["in"] != "path"]
    if parameters:
        rows = ["\n| parameter | values | meaning |", "|---|---|---|"]
        for one in parameters:
            name = f"`{one['name']}`" + (" (header)" if one["in"] == "header" else "")
            required = "required; " if one.get("required") else ""
            rows.append(
                f"| {name} | {kind_of(one['schema'])} | {_cell(required + _flat(one.get('description', '')))} |"
            )
        words.append("\n".join(rows) + "\n")
    if "requestBody" in call:
        words.append(f"\nBody: {_content(call['requestBody']['content'])}\n")
    answers = {status: answer for status, answer in call["responses"].items() if status not in USUAL}
    if answers:
        rows = ["\n| answer | content | meaning |", "|---|---|---|"]
        rows += [
            f"| {status} | {_content(answer.get('content', {}))} | {_answer(answer)} |"
            for status, answer in sorted(answers.items())
        ]
        words.append("\n".join(rows) + "\n")
    return "".join(words)


def _schema(name: str, schema: Json) -> str:
    words = f"\n### {name}\n"
    if schema.get("description"):
        words += f"\n{_flat(schema['description'])}\n"
    if "properties" not in schema:
        return words + f"\n{kind_of(schema)}\n"
    required = set(schema.get("required", ()))
    rows = ["\n| member | values | meaning |", "|---|---|---|"]
    for member, part in schema["properties"].items():
        mark = "*" if member in required else ""
        rows.append(f"| `{member}`{mark} | {kind_of(part)} | {_cell(_flat(part.get('description', '')))} |")
    return words + "\n".join(rows) + "\n"


def _answer(answer: Json) -> str:
    """What the answer means; FastAPI's own phrase for any success says nothing."""
    return "" if answer["description"] == "Successful Response" else _cell(_flat(answer["description"]))


def _content(content: Json) -> str:
    parts = []
    for kind, body in content.items():
        what = kind_of(body["schema"]) if body.get("schema") else ""
        parts.append(what if kind.endswith("json") and what else f"`{kind}`")
    return ", ".join(parts) or "–"


def kind_of(schema: Json, words: Mapping[str, str] = MappingProxyType({}), literal: Callable[[Any], str] = str) -> str:
    """Kind of a value, with links to named schemas, its choices and bounds.

    words: for JSON's types. literal: how a choice is written.
    """
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for joined in ("anyOf", "oneOf", "allOf"):
        if joined in schema:
            return " or ".join(dict.fromkeys(kind_of(part, words, literal) for part in schema[joined]))
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{literal(value)}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any value")
    if kind == "array":
        if "prefixItems" in schema:
            return f"[{', '.join(kind_of(part, words, literal) for part in schema['prefixItems'])}]"
        return f"{words.get(kind, kind)} of {kind_of(schema.get('items', {}), words, literal)}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {kind_of(schema['additionalProperties'], words, literal)}"
    names = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [(sign, schema[name]) for name, sign in names.items() if name in schema]
    stated = (f"{sign} {bound:,}" if isinstance(bound, int) else f"{sign} {bound:g}" for sign, bound in bounds)
    return ", ".join([words.get(kind, kind), *stated])


def _flat(text: str) -> str:
    """One line; what would be HTML outside of code is escaped."""
    parts = " ".join(text.split()).split("`")
    return "`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
