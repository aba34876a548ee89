"""What a JSON schema bounds, and what it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KEYWORDS = (
    *("minItems", "maxItems", "minLength", "maxLength", "maxProperties"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
)


def unbounded(schema: Mapping[str, Any], definitions: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Paths of integers, texts and lists without upper bound, and of objects with any keys and any number of them."""
    for place, part in parts(schema, definitions, path):
        if "enum" in part or "const" in part:
            continue
        upper = {
            "integer": {"maximum", "exclusiveMaximum"},
            "string": {"maxLength", "pattern"},
            "array": {"maxItems"},
            "object": {"maxProperties"} if part.get("additionalProperties") else {"type"},
        }
        kind = part.get("type")
        if kind in upper and not upper[kind] & part.keys():
            yield f"{place}: {kind}"


def bounds(schema: Mapping[str, Any], definitions: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Paths with their bounds and defaults, as "minimum 0 maximum 9 default 3"."""
    for place, part in parts(schema, definitions, path):
        words = [f"{word} {part[word]:.19g}" for word in KEYWORDS if word in part]
        if isinstance(default := part.get("default"), int | float) and not isinstance(default, bool):
            words.append(f"default {default:g}")
        if words:
            yield place, " ".join(words)


def parts(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], path: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A schema and all in it by path. definitions: what `$ref` names. Schemas may not be recursive."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    yield path, schema
    for word in ("anyOf", "oneOf", "allOf"):
        for alternative in schema.get(word, ()):
            yield from parts(alternative, definitions, path)
    for item in [schema["items"]] if "items" in schema else schema.get("prefixItems", ()):
        yield from parts(item, definitions, f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from parts(schema["additionalProperties"], definitions, f"{path}.*")
    for name, member in schema.get("properties", {}).items():
        yield from parts(member, definitions, f"{path}.{name}" if path else name)
