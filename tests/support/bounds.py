"""What a JSON schema accepts without a bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def unbounded(schema: Mapping[str, Any], definitions: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Paths of integers, texts and lists without an upper bound, and of objects with any keys and any number of them.

    definitions: what `$ref` names. Schemas may not be recursive.
    """
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    for part in ("anyOf", "oneOf", "allOf"):
        for alternative in schema.get(part, ()):
            yield from unbounded(alternative, definitions, path)
    if "enum" in schema or "const" in schema:
        return
    bounds = {
        "integer": {"maximum", "exclusiveMaximum"},
        "string": {"maxLength", "pattern"},
        "array": {"maxItems"},
        "object": {"maxProperties"} if schema.get("additionalProperties") else {"type"},
    }
    kind = schema.get("type")
    if kind in bounds and not bounds[kind] & schema.keys():
        yield f"{path}: {kind}"
    for item in [schema["items"]] if "items" in schema else schema.get("prefixItems", ()):
        yield from unbounded(item, definitions, f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from unbounded(schema["additionalProperties"], definitions, f"{path}.*")
    for name, member in schema.get("properties", {}).items():
        yield from unbounded(member, definitions, f"{path}.{name}" if path else name)
