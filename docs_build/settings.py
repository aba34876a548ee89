"""Renders docs/configuration.md from the settings classes, so that the page cannot become stale.

`make docs` writes the page; a test fails when the page and the classes differ, or when a setting has no description.
"""

from __future__ import annotations

import math
import typing
from typing import Any

from pydantic import BaseModel

from docs_build.rest import kind_of
from gxpo_trainer.config import LossSettings
from gxpo_trainer.config.messages import OTHER_NAMES, submodels
from gxpo_trainer.config.run import RunConfig

INTRODUCTION = """# Configuration

<!-- Written by `make docs` from the settings classes; edit the descriptions there. -->

A run is one TOML or JSON file. A setting has a default or is marked required, an unknown one is an error, and
`gxpo config` helps:

```
.venv/bin/gxpo config --list-presets
.venv/bin/gxpo config --preset demo > run.toml      # a whole run file to start from
.venv/bin/gxpo config --check run.toml              # every bad setting with its fix; exit code 0 or 2
.venv/bin/gxpo train run.toml --set learner.rule.k=10 --set learner.rule.gate.threshold=2.0
```

`--set` takes a TOML value (`5`, `1e-5`, `inf`, `true`, `[3, 4, 5]`) or a bare word. A setting that may be absent
is switched off with `"none"`, since TOML has no null. Naming another rule (`--set learner.rule.name=sfpo`) starts
from that rule's defaults.

Gates: `gxpo config` states in its head at which step noise alone is expected to end the look-ahead. With the
defaults (τ = 0.5, warm-up 2) that is the 5th step.
"""

TEN = (
    ("model.path", "your model: a folder in transformers' layout, or a hub name"),
    ("model.max_length", "prompt and response together; not above the model's positions"),
    ("data.source", "your problems"),
    ("data.template", "what is asked around a problem; evaluations use the same, but for embedded tasks"),
    ("rollout.max_new_tokens", "as long as the model's answers: look at `rollout/truncated_fraction`"),
    ("rollout.prompts_per_step", "fewer for quicker, noisier steps"),
    ("rollout.samples_per_prompt", "more where most groups have no signal (`reward/zero_variance_fraction`)"),
    ("learner.optimizer.learning_rate", "about 1e-6 for all weights of a large model, 1e-5 to 1e-4 for LoRA"),
    ("evaluation.benchmarks", "your held-out problems"),
    ("budget.steps", "when to stop"),
)
"""The settings that a run of one's own changes first, and how."""

FIRST = """
## Ten settings you will change

The others have defaults that you can leave until a chart says otherwise ([troubleshooting](troubleshooting.md)).

| setting | set it to |
|---|---|
"""

NAMES = """
## Names in TRL and verl

An unknown setting with one of these names is answered with the setting here.

| TRL, verl | here | |
|---|---|---|
"""


WORDS = {
    "string": "text",
    "integer": "whole number",
    "boolean": "`true` or `false`",
    "null": '`"none"`',
    "array": "list",
}
"""Of the page, for JSON's types."""


def render_page() -> str:
    """The whole page as Markdown."""
    rows = [
        f"| {', '.join(f'`{name}`' for name in names.split(', '))} | `{setting}` | {remark} |"
        for names, setting, remark in OTHER_NAMES
    ]
    ten = "".join(f"| `{setting}` | {advice} |\n" for setting, advice in TEN)
    return INTRODUCTION + FIRST + ten + "".join(_sections(RunConfig, "")) + NAMES + "\n".join(rows) + "\n"


def undescribed(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Paths of leaf settings without a description, except choices, whose values describe them."""
    missing = []
    for name, field in model.model_fields.items():
        parts = submodels(field.annotation)
        for part in parts:
            missing += undescribed(part, f"{prefix}{name}.")
        if not parts and not field.description and not _is_choice(field.annotation):
            missing.append(f"{prefix}{name}")
    return missing


def _sections(model: type[BaseModel], prefix: str, *, one_of_several: bool = False, chosen: str = "") -> list[str]:
    """A table of the model's own settings, then one section for each of its parts.

    one_of_several: other classes may be there in its place, which its name chooses. chosen: that choice in the sections
    around it, for the title.
    """
    title = f"{prefix.rstrip('.') or 'The run'}{chosen}"
    key = "surrogate" if issubclass(model, LossSettings) else "name"
    kind = model.model_fields.get(key)
    if one_of_several and kind is not None and _is_choice(kind.annotation):
        names = " or ".join(map(_literal, typing.get_args(kind.annotation)))
        title += f" with {key} = {names}"
        chosen = f" with {prefix}{key} = {names}"
    own, parts, schema = [], [], model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        models = submodels(field.annotation)
        if name in getattr(model, "refused", ()):
            continue
        if not models:
            default = "required" if field.is_required() else f"`{_literal(field.get_default())}`"
            cells = (f"`{prefix}{name}`", kind_of(schema[name], WORDS, _literal), default, field.description or "")
            own.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        for part in models:
            parts += _sections(part, f"{prefix}{name}.", one_of_several=len(models) > 1, chosen=chosen)
    intro = " ".join((model.__doc__ or "").strip().partition("\n\n")[0].split())
    table = ["| setting | values | default | meaning |", "|---|---|---|---|", *own]
    return [f"\n## {title}\n\n{intro}\n\n" + "\n".join(table) + "\n", *parts]


def _is_choice(annotation: Any) -> bool:
    return typing.get_origin(annotation) is typing.Literal


def _literal(value: Any) -> str:
    """A value as TOML writes it."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_literal(part) for part in value) + "]"
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return f"{value:g}" if isinstance(value, float) else str(value)
