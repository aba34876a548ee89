"""The submit form from the config's JSON schema, parsing of its values, links to it, and the curl command. Pure."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from gxpo_dashboard.view_models.rules import Rule, follow

Json = dict[str, Any]
Kind = Literal["integer", "number", "boolean", "choice", "choices", "text", "texts", "list", "json"]

MAIN = (
    "name", "learner.rule.name", "learner.optimizer.learning_rate", "seed", "budget.steps", "budget.backward_passes",
    "rollout.prompts_per_step", "rollout.samples_per_prompt", "rollout.max_new_tokens", "model.path", "data.source",
)  # fmt: skip
"""Settings shown first, what is changed most before the others, with those of the rule that have a symbol."""
NUMBERS = ("integer", "number")
_RULE = "learner.rule."


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of the config.

    optional: may be empty, which means none. variant: the part of the schema that it belongs to, if others can take its
    place. variants: of one that selects such a part, the name of each with its part; shared: the settings that all of
    them have, with their defaults in the selected one.
    """

    path: str
    kind: Kind
    help: str
    value: Any
    options: tuple[Any, ...] = ()
    optional: bool = False
    variant: str = ""
    variants: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)

    @property
    def section(self) -> str:
        return self.path.partition(".")[0] if "." in self.path else "general"


class BadValue(ValueError):
    """The input is not a valid value of the setting."""


def settings_of(
    schema: Mapping[str, Any],
    config: Any,
    part: Mapping[str, Any] | None = None,
    prefix: str = "",
    variant: str = "",
    choice: Mapping[str, Any] | None = None,
) -> Iterator[Setting]:
    """Every setting of the schema with its current value, in schema order.

    For a part with variants (such as the update rule), the settings are those of the selected variant. part: of the
    schema, at the dotted path `prefix`, in `variant`. choice: the part's discriminator, if it has variants.
    """
    config = config if isinstance(config, Mapping) else {}
    part = schema if part is None else part
    for name, entry in part.get("properties", {}).items():
        path = f"{prefix}{name}"
        shape, optional = _resolve(schema, entry, config.get(name))
        value = config.get(name, entry.get("default"))
        words = str(entry.get("description") or shape.get("description") or "")
        if "properties" in shape and not optional:
            chosen = entry.get("discriminator")
            within = str(shape.get("title")) if chosen else variant
            yield from settings_of(schema, value, shape, f"{path}.", within, chosen)
        elif "properties" in shape:
            yield Setting(path, "json", words, value, optional=True, variant=variant)
        elif choice is not None and choice["propertyName"] == name:
            kind, _ = _kind(shape)  # a text where there are further variants
            variants = choice["mapping"]
            members = [follow(schema, {"$ref": reference})["properties"] for reference in variants.values()]
            shared = {n: e.get("default") for n, e in part["properties"].items() if all(n in of for of in members)}
            options = tuple(variants) if kind == "choice" else ()
            yield Setting(path, kind, words or "Variant.", value, options, variants=variants, shared=shared)
        else:
            kind, options = _kind(shape)
            options = (None, *options) if kind == "choice" and optional else options
            yield Setting(path, kind, words, value, options, optional, variant)


def all_paths(schema: Mapping[str, Any]) -> list[str]:
    """Dotted paths of the settings of all variants."""
    own = {setting.path: setting for setting in settings_of(schema, {})}
    shapes = [changed({}, {path: name}, own) for path, setting in own.items() for name in setting.variants]
    return list(dict.fromkeys(setting.path for shape in shapes for setting in settings_of(schema, shape)))


def _kind(shape: Mapping[str, Any]) -> tuple[Kind, tuple[Any, ...]]:
    """How a setting is entered, and its options."""
    options = tuple(shape.get("enum") or ([shape["const"]] if "const" in shape else []))
    items = shape.get("items") or {}
    if options:
        return "choice", options
    if shape.get("type") == "array" and items.get("enum"):
        return "choices", tuple(items["enum"])
    if shape.get("type") == "array" and items.get("type") in ("string", "integer", "number"):
        return "texts" if items["type"] == "string" else "list", ()
    kinds: dict[Any, Kind] = {"integer": "integer", "number": "number", "boolean": "boolean", "string": "text"}
    return kinds.get(shape.get("type"), "json"), ()


def _resolve(schema: Mapping[str, Any], entry: Mapping[str, Any], value: Any) -> tuple[Mapping[str, Any], bool]:
    """The effective schema of an entry, and whether it is nullable."""
    if "$ref" in entry:
        return _resolve(schema, follow(schema, entry), value)
    if "oneOf" in entry and "discriminator" in entry:
        mapping, key = entry["discriminator"]["mapping"], entry["discriminator"]["propertyName"]
        name = value.get(key) if isinstance(value, Mapping) else None
        default = (entry.get("default") or {}).get(key)
        reference = mapping.get(name) or mapping.get(default) or next(iter(mapping.values()))
        return follow(schema, {"$ref": reference}), False
    if "anyOf" in entry:
        kinds = [kind for kind in entry["anyOf"] if kind.get("type") != "null"]
        shape = _resolve(schema, kinds[0], value)[0] if len(kinds) == 1 else {}
        return shape, len(kinds) < len(entry["anyOf"])
    return entry, False


def main_paths(rule: Rule) -> list[str]:
    """Paths of the settings shown first, those of the rule after its name."""
    return [path for main in MAIN for path in ((main, *rule_symbols(rule)) if main == f"{_RULE}name" else (main,))]


def rule_symbols(rule: Rule) -> dict[str, str]:
    """Path → symbol of the rule's main settings."""
    return {f"{_RULE}{setting}": symbol for setting, symbol in rule.symbols.items()}


def key(preset: str, setting: Setting) -> str:
    """Identity of an input: a variant's settings are its own, although variants share paths."""
    owner = f"{preset}-{setting.variant}" if setting.variant else preset
    return f"set-{owner}-{setting.path}"


def label(path: str, symbols: Mapping[str, str] | None = None) -> str:
    """`learner.optimizer.learning_rate` → `Optimizer learning rate`; `learner.rule.k` → `Rule K` by its symbol.

    symbols: path → symbol.
    """
    *parents, leaf = path.split(".")
    words = (symbols or {}).get(path) or leaf.replace("_", " ")
    if not parents:
        return words.capitalize()
    return f"{parents[-1].replace('_', ' ').capitalize()} {words}"


def parse(setting: Setting, typed: Any) -> Any:
    """Parse a widget's input; several values of a number are a list, an axis of a sweep. Raises BadValue."""
    if setting.kind in ("boolean", "choice", "choices"):
        return list(typed) if setting.kind == "choices" else typed
    text = "" if typed is None else str(typed).strip()
    if not text:
        if setting.optional:
            return None
        if setting.kind in ("texts", "list"):
            return []
        raise BadValue(f"{setting.path} must have a value")
    if setting.kind in NUMBERS and re.search(r"(?<![\w.])\d{1,3}(,\d{3})+(?!\w)", text):
        raise BadValue(f"{setting.path} = {text!r}: write 1000 for a thousand, and several values as 1, 200")
    parser, expected = _PARSERS[setting.kind]
    try:
        parsed = [parser(part) for part in (setting.kind in NUMBERS and parts(text)) or [text]]
    except (ValueError, RecursionError) as error:
        raise BadValue(f"{setting.path} = {text!r} is not {expected}") from error
    return parsed if len(parsed) > 1 else parsed[0]


def axes(changes: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, list[Any]]:
    """The changed settings that have several values, by dotted path."""
    numbers = {path: value for path, value in changes.items() if settings[path].kind in NUMBERS}
    return {path: value for path, value in numbers.items() if isinstance(value, list)}


def widget_value(setting: Setting, value: Any) -> Any:
    """A value of a setting as its widget shows it."""
    if setting.kind == "boolean":
        return bool(value)
    if setting.kind == "choice":
        return value if value in setting.options else setting.options[0]
    if setting.kind == "choices":
        return [item for item in value or () if item in setting.options]
    if value is None:
        return ""
    text = words = json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        words = value
    elif isinstance(value, list) and setting.kind != "json":
        words = ", ".join(map(str, value))
    with suppress(BadValue):
        # A field drops line breaks.
        if words.isprintable() and parse(setting, words) == value:
            return words
    return text


def changed(config: Mapping[str, Any], changes: Mapping[str, Any], settings: Mapping[str, Setting]) -> Json:
    """A copy of a config with changed settings, by dotted path. As with `--set`, another variant starts from its
    defaults, with what all variants have and was not at its default. Other data are not measured on the embedded task
    that they replace. settings: of the config."""
    result: Json = copy.deepcopy(dict(config))
    kept: Json = {}
    for path, value in changes.items():
        own = settings[path]
        if own.variants.get(str(get(config, path))) != own.variants.get(str(value)):
            section = path.rpartition(".")[0]
            members = get(config, section) or {}
            kept[section] = {name: v for name, v in members.items() if own.shared.get(name, v) != v}
    for path, value in (kept | dict(changes)).items():
        *parents, leaf = path.split(".")
        place = result
        for part in parents:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[leaf] = value
    # An embedded task is its own benchmark; for other data the service chooses.
    on_own_task = get(config, "evaluation.benchmarks") == [get(config, "data.source")]
    if on_own_task and "data.source" in changes and "evaluation.benchmarks" not in changes:
        del result["evaluation"]["benchmarks"]
    return result


def in_link(changes: Mapping[str, Any]) -> list[str]:
    """Changed settings, by dotted path, as the words of a link: `learner.rule.k=7`."""
    return [f"{path}={json.dumps(value, ensure_ascii=False)}" for path, value in changes.items()]


def of_link(words: Iterable[str], settings: Mapping[str, Setting]) -> tuple[Json, list[str]]:
    """The changed settings of a link, by dotted path, and the words that fit no setting or have an unsuitable value."""
    changes: Json = {}
    others: list[str] = []
    for word in words:
        path, _, text = word.partition("=")
        try:
            value = _json(text)
            # What its widget can show; whether it is valid is for the service to say.
            entered = parse(settings[path], widget_value(settings[path], value))
            if entered != value:
                raise BadValue(word)
            changes[path] = entered
        except (KeyError, TypeError, ValueError, RecursionError):
            others.append(word)
    return changes, others


def get(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None."""
    place: Any = config
    for part in path.split("."):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place


def flat(config: Mapping[str, Any], prefix: str = "") -> Json:
    """Every setting of a config by its dotted path."""
    result: Json = {}
    for name, value in config.items():
        nested = isinstance(value, Mapping) and value
        result |= flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return result


def differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, bool]:
    """Path of each setting of two flat configs, in order → whether they differ."""
    missing = object()
    return {path: own.get(path, missing) != other.get(path, missing) for path in (*own, *(other.keys() - own.keys()))}


def parts(text: str) -> list[str]:
    """`3, 5; 10` → ["3", "5", "10"]."""
    return [part.strip() for part in text.replace(";", ",").split(",") if part.strip()]


def values(text: str) -> list[Any]:
    """`3, 5, 10` → [3, 5, 10]; other values stay text."""
    return [_value(part) for part in parts(text)]


def _value(text: str) -> Any:
    for kind in (int, _float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def _float(text: str) -> float | str:
    """A float; NaN and infinities as the strings that the API expects."""
    value = float(text)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _json(text: str) -> Any:
    """JSON; NaN and infinities as the strings that the API expects."""
    value = json.loads(text, parse_constant=str, parse_float=_float)
    # Half of a surrogate pair, which no request can carry, is a UnicodeEncodeError: a ValueError.
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _json_after(marks: str, parser: Callable[[str], Any]) -> Callable[[str], Any]:
    """The parser, except for a text that begins with one of these marks, which is JSON."""
    return lambda text: _json(text) if text[0] in marks else parser(text)


_PARSERS: Mapping[Kind, tuple[Callable[[str], Any], str]] = {
    "integer": (int, "an integer"),
    "number": (_float, "a number"),
    "text": (_json_after('"', str), 'text; in quotes, it is JSON such as "two\\nlines"'),
    "texts": (_json_after("[", parts), 'a list such as ["a", "b"]'),
    "list": (_json_after("[", values), "a list such as [1, 2]"),
    "json": (_json_after('[{"', _value), "a value such as [0.5, 2.0]"),
}


def curl(url: str, path: str, body: Mapping[str, Any]) -> str:
    """A POST request to a path of the API as a curl command, with the token from the environment."""
    quoted = json.dumps(body, indent=2).replace("'", "'\\''")
    return (
        f"curl -X POST {url.rstrip('/')}/api/v1{path} \\\n"
        '  -H "Authorization: Bearer $GXPO_TOKEN" \\\n'
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d '{quoted}'"
    )
