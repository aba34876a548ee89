"""Expansion of base config, grid and seeds to the configs of a sweep. Pure, apart from the server's policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tomli_w

from gxpo_services.api.errors import FieldError, Invalid
from gxpo_services.configs.checks import Settings, checked, invalid, overridden, settings_of
from gxpo_services.groups.presets import PRESETS, rule_variants
from gxpo_services.groups.schemas import MAX_RUNS, SweepRequest
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import learning_rate_control

_MOST_ERRORS = 100


@dataclass(frozen=True, slots=True)
class Planned:
    """A run of a sweep. values: its settings in the sweep by dotted path, including the seed."""

    config: RunConfig
    values: dict[str, Any]


Variant = tuple[RunConfig, dict[str, Any]]


def plan(request: SweepRequest, server: ServiceSettings) -> list[Planned]:
    """Every run of a sweep with its name, in grid order with the seeds innermost.

    Raises Invalid with every invalid member and setting.
    """
    grid = _grid(request)
    errors = _shape_errors(request, grid)
    if errors:
        raise invalid(errors)
    base = settings_of(request.base, "base.")
    variants = _variants(request, server, base, grid)
    has_control = request.control or (request.preset is not None and PRESETS[request.preset].control)
    if has_control:
        variants += _controls(variants)
    size = len(variants) * max(1, len(request.seeds))
    if size > MAX_RUNS:
        raise invalid([_too_many(size)])
    planned = [
        _seeded(request.name, config, values, seed)
        for config, values in variants
        for seed in request.seeds or [config.seed]
    ]
    _check_distinct(planned)
    return planned


def _grid(request: SweepRequest) -> dict[str, list[Any]]:
    """The preset's axes, extended or replaced by the request's own."""
    preset = PRESETS[request.preset].grid if request.preset is not None else {}
    return {**preset, **request.grid}


def _shape_errors(request: SweepRequest, grid: dict[str, list[Any]]) -> list[FieldError]:
    errors = []
    if "seed" in grid:
        errors.append(FieldError(field="grid.seed", message="must be set with seeds; remove it from the grid"))
    for path, values in {**{f"grid.{path}": values for path, values in grid.items()}, "seeds": request.seeds}.items():
        twice = [value for number, value in enumerate(values) if value in values[:number]]
        if twice:
            errors.append(FieldError(field=path, message=f"contains {twice[0]!r} twice; name each value once"))
    size = max(1, len(request.seeds))
    for values in grid.values():
        size *= len(values)
    if size > MAX_RUNS:
        errors.append(_too_many(size))
    return errors


def _too_many(size: int) -> FieldError:
    return FieldError(field="grid", message=f"makes {size} runs including seeds; a sweep has at most {MAX_RUNS}")


def _variants(
    request: SweepRequest, server: ServiceSettings, base: Settings, grid: dict[str, list[Any]]
) -> list[Variant]:
    """Every combination of the grid; for the preset `rules`, with every rule."""
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    found: list[Variant] = []

    def one(values: dict[str, Any]) -> None:
        config = checked(overridden(base, [_override(path, value) for path, value in values.items()], "grid"), server)
        if request.preset == "rules":
            found.extend((variant, values | changed) for variant, changed in rule_variants(config))
        else:
            found.append((config, values))

    errors = list(_errors_of(one, combinations))
    if errors:
        raise invalid(errors[:_MOST_ERRORS])
    return found


def _errors_of(one: Callable[[dict[str, Any]], None], combinations: Sequence[dict[str, Any]]) -> Iterator[FieldError]:
    """Invalid settings of all combinations; those of overrides are named by their axis."""
    for values in combinations:
        try:
            one(values)
        except Invalid as error:
            paths = list(values)
            for item in error.errors:
                if item.field.startswith("grid["):
                    item.field = f"grid.{paths[int(item.field[5:-1])]}"
                yield item


def _override(path: str, value: Any) -> str:
    """`a.b=c` with the value in TOML; null is the word "none"."""
    words = tomli_w.dumps({"value": "none" if value is None else value}).removeprefix("value = ").strip()
    return f"{path}={words}"


def _controls(variants: Sequence[Variant]) -> list[Variant]:
    """The learning-rate control of every look-ahead, without duplicates."""
    found: dict[str, Variant] = {}
    present = {config.sha256() for config, _ in variants}
    for config, _ in variants:
        if config.learner.rule.learning_rate_factor is None:
            continue
        control = learning_rate_control(config)
        learner = control.learner
        if control.sha256() not in present:
            rate = learner.optimizer.learning_rate
            values = {"learner.rule.name": learner.rule.name, "learner.optimizer.learning_rate": rate}
            found.setdefault(control.sha256(), (control, values))
    return list(found.values())


def _seeded(name: str, config: RunConfig, values: dict[str, Any], seed: int) -> Planned:
    values = {**values, "seed": seed}
    words = " ".join(f"{_short(path)}={_word(value)}" for path, value in values.items())
    return Planned(config.model_copy(update={"seed": seed, "name": f"{name} {words}"[:200]}), values)


def _short(path: str) -> str:
    """Short name of a setting: `rule` for learner.rule.name, `gate.threshold`, otherwise the last component."""
    parts = path.split(".")
    if parts[-1] == "name" and len(parts) > 1:
        return parts[-2]
    return ".".join(parts[-2:]) if parts[-2:-1] == ["gate"] else parts[-1]


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check_distinct(planned: Sequence[Planned]) -> None:
    seen: dict[str, Planned] = {}
    for run in planned:
        other = seen.setdefault(run.config.sha256(), run)
        if other is not run:
            message = f"contains a duplicate: {other.config.name!r} and {run.config.name!r} have the same config"
            raise Invalid.of("grid", message)
