"""The runs of a sweep: base config × grid × seeds, sweep presets and learning-rate controls. Pure, apart from the
server's policy for configs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from gxpo_services.api.errors import FieldError, Invalid
from gxpo_services.api.fields import MAX_INTEGER, Body, Text, Word
from gxpo_services.runs.configs import RunSource, Settings, checked, invalid, overridden, settings_of
from gxpo_services.runs.schemas import Notes, Priority, Tags
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import learning_rate_control, toml_value
from gxpo_trainer.config.messages import MOST_ERRORS, config_error
from gxpo_trainer.config.rules import COMPARED_LABELS, RULE_CHOICE, compared_rules, in_words, rule_name

SweepPreset = Literal["alpha", "k", "tau", "rules"]
_Integer = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]
Scalar = bool | _Integer | float | Annotated[Text, Field(max_length=100_000)]
GridValue = Scalar | Annotated[list[Scalar], Field(max_length=20)] | None
Path = Annotated[Text, Field(min_length=1, max_length=200)]
MAX_RUNS = 500
"""Runs of one sweep."""
_TOO_MANY = f"makes {{size}} runs including seeds; a sweep has at most {MAX_RUNS}"


class SweepRequest(Body):
    """One base config × a grid of settings × seeds."""

    name: Word = Field(description="Display name; a prefix of the runs' names.", examples=["alpha ablation"])
    base: RunSource = Field(description="The base config of all runs.", examples=[{"preset": "demo"}])
    grid: dict[Path, Annotated[list[GridValue], Field(min_length=1, max_length=100)]] = Field(
        {},
        max_length=8,
        description="Dotted path → values; every combination is a run.",
        examples=[{"learner.rule.k": [3, 5, 10]}],
    )
    seeds: list[Annotated[int, Field(ge=0, le=MAX_INTEGER)]] = Field(
        [],
        max_length=100,
        description="Seeds of each combination; default: the seed of the base.",
        examples=[[0, 1, 2]],
    )
    preset: SweepPreset | None = Field(
        None,
        description="A preset grid: the paper's `alpha` (α × K), `k` and `tau`, or "
        f"`rules`: {in_words(COMPARED_LABELS, 'and')}.",
    )
    control: bool = Field(
        False,
        description="Add GRPO at learning rate × (αK + 1) for every look-ahead, as a control for the longer step.",
    )
    tags: Tags = Field([], description="Tags of every run.")
    notes: Notes = Field("", description="Notes of every run.")
    priority: Priority = Field(0, description="Higher ones start first.")


class SweepPresetView(BaseModel):
    """A sweep preset."""

    name: SweepPreset
    summary: str
    grid: dict[str, list[Any]] = Field(description="Empty for `rules`, which replaces the whole rule.")
    control: bool = Field(description="Whether it includes the learning-rate control.")


_GRIDS: dict[SweepPreset, tuple[dict[str, list[Any]], str]] = {
    "alpha": (
        {"learner.rule.k": [3, 5, 10], "learner.rule.alpha": [0.1, 0.5, 1.0]},
        "Reposition strength α at each depth K (the paper's Table 5).",
    ),
    "k": ({"learner.rule.k": [3, 5, 10]}, "Virtual depth K, as in the paper's main results."),
    "tau": (
        {"learner.rule.k": [5], "learner.rule.gate.threshold": [0.7, 1.0, 1.5, 2.0]},
        "Threshold τ of the gate at K = 5 (the paper's ablation).",
    ),
    "rules": (
        {},
        f"{in_words(COMPARED_LABELS, 'and')} with the base's K and α, and GRPO at learning rate × (αK + 1), to rule "
        "out that a gain comes from the longer step alone.",
    ),
}
PRESETS = {
    name: SweepPresetView(name=name, summary=summary, grid=grid, control=name == "rules")
    for name, (grid, summary) in _GRIDS.items()
}


Variant = tuple[RunConfig, dict[str, Any]]


def rule_variants(base: RunConfig) -> list[Variant]:
    """The base with each rule, and its distinguishing settings. Raises Invalid for a base without a look-ahead."""
    rule = base.learner.rule
    if not rule.sweep_base:
        bases = in_words([f'"{rule_name(other)}"' for other in RULE_CHOICE.known() if other.sweep_base])
        message = f'is "{rule.name}"; preset rules takes K, α and the gate from a base with rule {bases}'
        raise Invalid.of("config.learner.rule.name", message)
    variants = []
    for other in compared_rules():
        try:
            adapted = other.adapted_from(rule)
        except ValidationError as error:
            message = f"does not fit rule {rule_name(other)}: {config_error(error, 'it')}"
            raise Invalid.of("config.learner.rule", message) from None
        learner = base.learner.model_copy(update={"rule": adapted})
        variants.append((base.model_copy(update={"learner": learner}), {"learner.rule.name": rule_name(other)}))
    return variants


class Planned(NamedTuple):
    """A run of a sweep. values: its settings in the sweep by dotted path, including the seed."""

    config: RunConfig
    values: dict[str, Any]


def plan(request: SweepRequest, server: ServiceSettings) -> list[Planned]:
    """Every run of a sweep with its name, in grid order with the seeds innermost.

    The request's axes extend or replace those of its preset. Raises Invalid with every invalid member and setting.
    """
    preset = PRESETS[request.preset] if request.preset is not None else None
    grid = {**(preset.grid if preset else {}), **request.grid}
    errors = _shape_errors(request, grid)
    if errors:
        raise invalid(errors)
    base = settings_of(request.base, "base.")
    variants = _variants(request, server, base, grid)
    if request.control or (preset is not None and preset.control):
        variants += _controls(variants)
    planned = [
        _seeded(request.name, config, values, seed)
        for config, values in variants
        for seed in request.seeds or [config.seed]
    ]
    if len(planned) > MAX_RUNS:
        raise Invalid.of("grid", _TOO_MANY.format(size=len(planned)))
    seen: dict[str, Planned] = {}
    for run in planned:
        if (other := seen.setdefault(run.config.sha256(), run)) is not run:
            message = f"contains a duplicate: {other.config.name!r} and {run.config.name!r} have the same config"
            raise Invalid.of("grid", message)
    return planned


def _shape_errors(request: SweepRequest, grid: dict[str, list[Any]]) -> list[FieldError]:
    errors = []
    if "seed" in grid:
        errors.append(FieldError(field="grid.seed", message="must be set with seeds; remove it from the grid"))
    for path, values in {**{f"grid.{path}": values for path, values in grid.items()}, "seeds": request.seeds}.items():
        twice = [value for number, value in enumerate(values) if value in values[:number]]
        if twice:
            errors.append(FieldError(field=path, message=f"contains {twice[0]!r} twice; name each value once"))
    size = math.prod(map(len, grid.values()), start=max(1, len(request.seeds)))
    if size > MAX_RUNS:
        errors.append(FieldError(field="grid", message=_TOO_MANY.format(size=size)))
    return errors


def _variants(
    request: SweepRequest, server: ServiceSettings, base: Settings, grid: dict[str, list[Any]]
) -> list[Variant]:
    """Every combination of the grid; for the preset `rules`, with every rule that differs."""
    errors: list[FieldError] = []
    variants: list[Variant] = []
    refused = 0
    for chosen in itertools.product(*grid.values()):
        values = dict(zip(grid, chosen, strict=True))
        try:
            overrides = [_override(path, value) for path, value in values.items()]
            config = checked(overridden(base, overrides, "grid"), server)
            if request.preset == "rules":
                of_rules = [(variant, _shared(values, variant) | changed) for variant, changed in rule_variants(config)]
                variants += [variant for variant in of_rules if variant not in variants]
            else:
                variants.append((config, values))
        except Invalid as error:
            for item in error.errors:
                if item.field.startswith("grid["):  # an override; name it by its axis
                    item.field = f"grid.{list(values)[int(item.field[5:-1])]}"
                elif (path := item.field.removeprefix("config.")) in grid:
                    item.field = f"grid.{path}"
            errors += [item for item in error.errors if item not in errors]
            refused += 1
            if refused >= MOST_ERRORS:
                break  # the other combinations of a bad base would only repeat its errors
    if errors:
        raise invalid(errors[:MOST_ERRORS])
    return variants


def _shared(values: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """The values of a grid without those of settings that the config's rule lacks."""
    known = config.learner.rule.model_dump()
    return {
        path: value
        for path, value in values.items()
        if not path.startswith("learner.rule.") or path.split(".")[2] in known
    }


def _override(path: str, value: Any) -> str:
    """`a.b=c` with the value in TOML; null is the word "none"."""
    return f"{path}={toml_value('none' if value is None else value)}"


def _controls(variants: Sequence[Variant]) -> list[Variant]:
    """The learning-rate control of every look-ahead, without duplicates."""
    controls: dict[str, Variant] = {}
    present = {config.sha256() for config, _ in variants}
    for config, values in variants:
        if config.learner.rule.learning_rate_factor is not None:
            control = learning_rate_control(config)
            rule, rate = control.learner.rule.name, control.learner.optimizer.learning_rate
            own = {"learner.rule.name": rule, "learner.optimizer.learning_rate": rate}
            controls.setdefault(control.sha256(), (control, _shared(values, control) | own))
    return [variant for sha256, variant in controls.items() if sha256 not in present]


def _seeded(name: str, config: RunConfig, values: dict[str, Any], seed: int) -> Planned:
    values = {**values, "seed": seed}
    texts = {path: f"{value:g}" if isinstance(value, float) else str(value) for path, value in values.items()}
    words = " ".join(f"{_short(path)}={text}" for path, text in texts.items())
    return Planned(config.model_copy(update={"seed": seed, "name": f"{name} {words}"[:200]}), values)


def _short(path: str) -> str:
    """Short name of a setting: `rule` for learner.rule.name, `gate.threshold`, otherwise the last component."""
    parts = path.removesuffix(".name").split(".")
    return ".".join(parts[-2:]) if parts[-2:-1] == ["gate"] else parts[-1]
