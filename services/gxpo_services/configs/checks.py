"""Validation of submitted configs; reports every invalid setting."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from gxpo_services.api.errors import FieldError, Invalid
from gxpo_services.api.fields import MAX_INTEGER, faults
from gxpo_services.configs.cost import resources
from gxpo_services.configs.plan import cannot_fit, cannot_split
from gxpo_services.configs.policy import refusals
from gxpo_services.configs.schemas import RunSource
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import apply_overrides, build, load_preset, preset_names
from gxpo_trainer.config.messages import BadSettings
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.jsonl import plain

_LONGEST_MODEL = 400
Settings = dict[str, Any]


def settings_of(source: RunSource, where: str = "") -> Settings:
    """Nested settings with the source's overrides applied, not yet validated.

    where: prefix of member names in errors, such as `base.`. Raises Invalid.
    """
    if source.preset is not None:
        if source.preset not in preset_names():
            message = f"there is no preset {source.preset!r}; choose from {', '.join(preset_names())}"
            raise Invalid.of(f"{where}preset", message)
        values = plain(load_preset(source.preset).model_dump())
    elif source.toml is not None:
        values = _parsed(source.toml, f"{where}toml")
    else:
        values = source.config or {}
    found = faults(values)
    if found:
        raise invalid(_fields(found))
    return overridden(values, source.overrides, f"{where}overrides")


def overridden(values: Settings, overrides: Sequence[str], field: str) -> Settings:
    """Apply every `a.b=c` to `values`. Raises Invalid naming the invalid ones as `field[n]`."""
    errors = []
    for number, text in enumerate(overrides):
        try:
            bad = faults(apply_overrides({}, [text]))
            message = bad[0][1] if bad else ""
        except ConfigError as error:
            message = str(error).removeprefix(f"--set {text}: ")
        except (ValueError, RecursionError):
            message = "its value cannot be read"
        if message:
            errors.append(FieldError(field=f"{field}[{number}]", message=message))
    if errors:
        raise invalid(errors)
    return apply_overrides(values, overrides)


def checked(values: Settings, server: ServiceSettings) -> RunConfig:
    """The config, if both the trainer and this server accept it. Raises Invalid with every invalid setting."""
    found = refusals(values, server)
    try:
        config = build(values)
    except BadSettings as error:
        raise invalid(_fields([*error.settings, *found])) from None
    found += _unstorable(config) + _above_quotas(config, server)
    # These read the model's folder, which is allowed only where nothing has been refused.
    found = found or cannot_split(config) or cannot_fit(config, server)
    if found:
        raise invalid(_fields(found))
    return config


def invalid(errors: Sequence[FieldError]) -> Invalid:
    """All invalid settings as one error, without duplicates, sorted by name."""
    unique = {(error.field, error.message): error for error in errors}
    ordered = sorted(unique.values(), key=lambda error: error.field)
    named = "; ".join(f"{error.field}: {error.message}" for error in ordered[:5])
    return Invalid(named + ("; …" if len(ordered) > 5 else ""), errors=ordered)


def _parsed(text: str, field: str) -> Settings:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise Invalid.of(field, f"is not valid TOML: {error}") from None


def _unstorable(config: RunConfig) -> list[tuple[str, str]]:
    """Settings that the config allows but the database cannot store."""
    found = []
    budget = config.budget
    numbers = {
        "seed": config.seed,
        "budget.steps": budget.steps,
        "budget.backward_passes": budget.backward_passes,
        "budget.tokens": budget.tokens,
    }
    for name, number in numbers.items():
        if number is not None and number > MAX_INTEGER:
            found.append((name, f"must be at most {MAX_INTEGER}"))
    if len(config.model.path) > _LONGEST_MODEL:
        found.append(("model.path", f"must be at most {_LONGEST_MODEL} characters"))
    if not math.isfinite(resources(config)[0]):
        found.append(
            ("placement", "learner_ranks × learner_cpus + samplers × sampler_cpus + verifier_cpus must be finite")
        )
    return found


def _above_quotas(config: RunConfig, server: ServiceSettings) -> list[tuple[str, str]]:
    """Quotas that the run exceeds even alone, so that it could never start."""
    cpus, gpus = resources(config)
    if config.placement.device == "auto" and server.quota_gpus == 0:
        gpus = 0.0  # it runs on CPUs there
    found = []
    for what, asked, quota in (("CPUs", cpus, server.quota_cpus), ("GPUs", gpus, server.quota_gpus)):
        # Logical CPUs are sums of fractions.
        if quota is not None and asked > quota and not math.isclose(asked, quota):
            bound = f"all runs together may use {quota:g} (GXPO_QUOTA_{what.upper()})"
            found.append(("placement", f"needs {asked:g} {what}, and {bound}; lower placement.* or raise the quota"))
    return found


def _fields(found: Sequence[tuple[str, str]]) -> list[FieldError]:
    return [FieldError(field=f"config.{path}" if path else "config", message=message) for path, message in found]


def stored(config: RunConfig) -> Settings:
    """The complete config as JSON values; `RunConfig.model_validate` restores it."""
    body: Settings = plain(config.model_dump(mode="json"))
    return body


def restored(values: Mapping[str, Any]) -> RunConfig:
    """A stored config."""
    return RunConfig.model_validate(values)
