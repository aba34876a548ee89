"""The tree of settings by dotted path, and pydantic's errors as one line per setting: `learner.rule.k = 1: must …`."""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
import tomllib
import typing
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import Any

from pydantic import BaseModel, ValidationError

from gxpo_trainer.config.components import CHOICE_ERROR, CHOICES
from gxpo_trainer.config.rules import RULE_CHOICE, in_words
from gxpo_trainer.config.run import RunConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.plugins import suggestion

MOST_ERRORS = 100
"""Invalid settings of one config that are reported: a request with more must not occupy the service for long."""
_LEAST_SIMILARITY, _LONGEST_TYPO = 0.7, 200
_SIMILAR, _ALMOST_EQUAL = 0.9, 0.95
"""Similarity of whole paths from which they count before the last word, and before names of other libraries."""

_TABLE = resources.files(__package__) / "other_names.toml"
OTHER_NAMES: tuple[tuple[str, str, str], ...] = tuple(
    (names, *meaning) for names, meaning in tomllib.loads(_TABLE.read_text(encoding="utf-8")).items()
)
"""(names in TRL and verl, setting, remark). A name stands for every path that ends with it."""


def submodels(annotation: Any) -> list[type[BaseModel]]:
    """The settings classes that a field of this annotation may contain: none, one, or all that can be chosen."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [*CHOICES[annotation].known()] if annotation in CHOICES else [annotation]
    return [model for part in typing.get_args(annotation) for model in submodels(part)]


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for part in submodels(field.annotation):
            yield from _walk(part, f"{prefix}{name}.")


_PATHS: dict[tuple[type[BaseModel], ...], tuple[str, ...]] = {}


def setting_paths() -> tuple[str, ...]:
    """Every dotted path once, sections before their contents, in the order of the classes."""
    classes = tuple(settings for choice in CHOICES.values() for settings in choice.known())
    if classes not in _PATHS:
        _PATHS[classes] = tuple(dict.fromkeys(_walk(RunConfig)))
    return _PATHS[classes]


_BY_OTHER_NAME = {
    name: f"{setting} ({remark})" if remark else setting
    for names, setting, remark in OTHER_NAMES
    for name in names.split(", ")
}


@functools.lru_cache(maxsize=256)  # each of a sweep's runs has the same mistyped paths
def nearest_setting(path: str) -> str | None:
    """The setting that TRL and verl call so, else the one most similar to a mistyped path or to its last word."""
    if len(path) > _LONGEST_TYPO:
        return None
    path = re.sub(r"\[\d+\]", "", path)
    parts, known = path.split("."), setting_paths()
    endings = (".".join(parts[start:]) for start in range(len(parts)))
    other = [_BY_OTHER_NAME[name] for name in endings if name in _BY_OTHER_NAME]
    by_last_word = {setting.rpartition(".")[2]: setting for setting in reversed(known)}
    last = difflib.get_close_matches(parts[-1], by_last_word, 1, _LEAST_SIMILARITY)
    candidates = [
        *difflib.get_close_matches(path, known, 1, _ALMOST_EQUAL),
        *other,
        *difflib.get_close_matches(path, known, 1, _SIMILAR),
        *(by_last_word[word] for word in last),
        *difflib.get_close_matches(path, known, 1, _LEAST_SIMILARITY),
    ]
    return candidates[0] if candidates else None


def show(value: Any) -> str:
    """A value as written in a config, shortened."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "…"


def error_path(location: Iterable[str | int], *, keep_last: bool, root: type[BaseModel] = RunConfig) -> str:
    """Dotted path of a pydantic location; names of union members (`gxpo`, `tuple[float, float]`) are dropped.

    keep_last: the last segment is a key of the user's file, known or not. So are the keys of a table with any names,
    such as the arms of a study.
    """
    segments = list(location)
    candidates: list[type[BaseModel]] = [root]
    parts: list[str] = []
    any_names = False
    for position, segment in enumerate(segments):
        if isinstance(segment, int):
            parts[-1] += f"[{segment}]"
            continue
        if any_names:
            parts.append(segment)
            any_names = False
            continue
        owners = [model for model in candidates if segment in model.model_fields]
        if owners:
            parts.append(segment)
            annotations = [model.model_fields[segment].annotation for model in owners]
            candidates = [part for annotation in annotations for part in submodels(annotation)]
            any_names = any(typing.get_origin(annotation) is dict for annotation in annotations)
        elif keep_last and position == len(segments) - 1:
            parts.append(segment)
    return ".".join(parts)


_PHRASES = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "must be a whole number"),
    "int_parsing_size": "must be a smaller whole number",
    "finite_number": "must be a finite number",
    **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
    "string_type": "must be text; put it in quotes",
    "string_too_short": "must not be empty",
    "string_too_long": "must be at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    **dict.fromkeys(("tuple_type", "list_type"), "must be a list in brackets"),
    "missing": "is missing; set it",
    "extra_forbidden": "is unknown; remove it",
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a table of settings"),
}


class BadSettings(ConfigError):
    """A config that cannot be used; `settings` are (dotted path, problem and fix).

    The path is empty for a problem that does not belong to one setting or section.
    """

    def __init__(self, message: str, settings: tuple[tuple[str, str], ...]) -> None:
        super().__init__(message)
        self.settings = settings


def phrase(error: Any) -> str:
    """The problem and fix of one pydantic error, without its setting and value."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind in ("literal_error", "enum"):
        return f"must be {context['expected']}".replace("'", '"')
    if kind in ("too_short", "too_long") and isinstance(error.get("input"), str):
        kind = f"string_{kind}"  # of a text with a validator of its own
    elif kind in ("too_short", "too_long") and "actual_length" in context:
        bound = f"at least {context['min_length']}" if kind == "too_short" else f"at most {context['max_length']}"
        length = context["actual_length"]  # None of a dict
        return f"must have {bound} entries" if length is None else f"has {length} entries and must have {bound}"
    if kind == "missing" and error["loc"] and isinstance(error["loc"][-1], int):
        return "is missing from the list"
    return _PHRASES[kind].format(**context) if kind in _PHRASES else str(error["msg"])


def _parts(error: Any, root: type[BaseModel]) -> tuple[str, str, str]:
    """(path, ` = value` or nothing, problem and fix) of one pydantic error."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    path = error_path(error["loc"], keep_last=kind == "extra_forbidden", root=root)
    if kind == "union_tag_not_found":
        return f"{path}.name", "", f"is missing; set it to {in_words([show(name) for name in RULE_CHOICE.names()])}"
    if kind == "union_tag_invalid":  # no text
        wanted = context["expected_tags"].replace("'", '"')
        return f"{path}.name", f" = {show(context['tag'])}", f"must be one of {wanted}"
    if kind == CHOICE_ERROR:
        return f"{path}.{context['key']}", f" = {show(value[context['key']])}", context["reason"]
    if kind == "extra_forbidden":
        if root is not RunConfig:
            names = {name.rpartition(".")[2] for name in _walk(root)}
            problem = f"unknown setting{suggestion(path.rpartition('.')[2], names) or '; remove it'}"
        elif path in setting_paths():
            problem = "is not a setting of the selected rule; remove it or select a rule that has it"
        else:
            near = nearest_setting(path)
            fix = f"did you mean {near}?" if near else "`gxpo config --schema` lists all settings; remove it"
            problem = f"unknown setting; {fix}"
        return path, f" = {show(value)}", problem
    message = phrase(error)
    if (isinstance(value, dict) and kind == "value_error") or kind == "missing":
        return path, "", message
    return path, f" = {show(value)}", message


def config_error(error: ValidationError, source: str, root: type[BaseModel] = RunConfig) -> BadSettings:
    """All invalid settings of one validation of `root`, one line each, in a single ConfigError.

    The errors of a setting's alternative forms are one message.
    """
    by_setting: dict[tuple[str, str], dict[str, None]] = {}
    errors = error.errors(include_url=False)[:MOST_ERRORS]
    lists = {part["loc"][:-1] for part in errors if part["loc"]}
    for part in errors:
        if part["type"] == "too_short" and part["loc"] in lists:
            continue  # pydantic counts valid entries alone
        path, value, message = _parts(part, root)
        by_setting.setdefault((path, value), {})[message] = None
    merged = []
    for (path, value), (first, *others) in by_setting.items():
        merged.append((path, value, first + "".join(f", or {other.removeprefix('must be ')}" for other in others)))
    lines = [f"{path}{value}: {message}" if path or value else message for path, value, message in merged]
    text = "\n".join([f"{source} cannot be used:", *(f"  {line}" for line in lines)])
    return BadSettings(text, tuple((path, message) for path, _, message in merged))
