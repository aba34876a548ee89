"""Submitted configs: validation by trainer and server, which reports every invalid setting at once; and `/schema`,
`/presets` and `/published`: what a config can be, presets to start from, and the paper's results.

The server's policy restricts folders, hub names, code and addresses. It works on plain nested values, so that
violations are reported together with validation errors. Paths are checked after resolving `~`, `..` and symbolic links.
Nothing is URL-decoded, as in the file system."""

from __future__ import annotations

import functools
import math
import os
import re
import shlex
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field, model_validator

from gxpo_services.api.dependencies import ServiceRoute, Viewer
from gxpo_services.api.errors import FieldError, Invalid, responses
from gxpo_services.api.fields import Body, Text, faults
from gxpo_services.runs.plan import cannot_fit, cannot_work, resources
from gxpo_services.settings import ServiceSettings
from gxpo_trainer import plugins
from gxpo_trainer.compare.published import PublishedPaper, gxpo_paper
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.components import CHOICES
from gxpo_trainer.config.engines import STARTER_POLICIES
from gxpo_trainer.config.io import apply_overrides, build, load_preset, preset_texts, to_toml
from gxpo_trainer.config.messages import BadSettings
from gxpo_trainer.config.tasks import AGENT, EMBEDDED_TASKS
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.jsonl import plain

Override = Annotated[Text, Field(min_length=1, max_length=2000)]

EXAMPLE_CONFIG: dict[str, Any] = {
    "name": "gxpo on word problems",
    "learner": {"rule": {"name": "gxpo", "k": 5, "alpha": 0.5}},
    "budget": {"steps": 40},
}


class RunSource(Body):
    """Source of a config: exactly one of `config`, `toml` and `preset`, plus `overrides`."""

    config: dict[str, Any] | None = Field(
        None, description="Nested settings; omitted ones have their defaults.", examples=[EXAMPLE_CONFIG]
    )
    toml: Text | None = Field(None, max_length=200_000, description="The config as the text of a run file.")
    preset: Text | None = Field(None, max_length=100, description="Name of a preset.", examples=["demo"])
    overrides: list[Override] = Field(
        [], max_length=200, description="`a.b=c` as for `gxpo train --set`.", examples=[["learner.rule.k=10"]]
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> RunSource:
        given = [name for name in ("config", "toml", "preset") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of config, toml and preset is required, not {' and '.join(given) or 'none'}")
        return self


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
"""Narrower than what the trainer tries on the hub: no part of a name may be `.` or `..`, which are folders."""
_PATH_STARTS = ("/", "~", "./", "../")
_DATA_FILES = (".jsonl", ".parquet", ".json", ".csv")
_MOST_ITEMS = 100
Refusals = list[tuple[str, str]]


def refusals(values: Mapping[str, Any], server: ServiceSettings) -> Refusals:
    """(dotted path, reason and fix) of every setting that this server does not allow. values: nested settings, possibly
    incomplete; wrong types are left to the config's validation."""
    refused: Refusals = []

    def check_place(path: str, name: Any, embedded: Collection[str], roots: tuple[Path, ...], hub: bool | None) -> None:
        fault = _place_fault(name, roots, hub=hub) if isinstance(name, str) and name not in embedded else None
        if fault is not None:
            refused.append((path, fault))

    def check_address(path: str, url: Any, known: Sequence[str]) -> None:
        if isinstance(url, str) and url not in known:
            fault = f"is not an allowed address on this server; choose from {', '.join(known) or 'none'}"
            refused.append((path, fault))

    for name in ("model.path", "teacher.path"):
        check_place(name, setting(values, name), STARTER_POLICIES, server.model_roots, server.allow_hub)
    if setting(values, "model.trust_remote_code") not in (None, False) and not server.allow_remote_code:
        refused.append(("model.trust_remote_code", "is not allowed on this server; set it to false"))
    for section in ("data", "warm_start.data"):
        listed = ((f"{section}.sources[{n}]", s) for n, s in enumerate(_items(values, f"{section}.sources")))
        for place, data in ((section, setting(values, section)), *listed):
            if not isinstance(data, Mapping):
                continue
            key = "source" if place == section else "path"
            check_place(f"{place}.{key}", data.get(key), EMBEDDED_TASKS, server.data_roots, server.allow_hub)
            for name in ("split", "subset"):  # parts of file names below the source
                if isinstance(part := data.get(name), str) and not _is_inner_name(part):
                    refused.append((f"{place}.{name}", "must be a relative path inside the data set, without .."))
    data_root = setting(values, "evaluation.data_root")
    check_place("evaluation.data_root", data_root, ("none",), server.data_roots, None)
    from_hub = data_root in (None, "none")
    for number, name in enumerate(_items(values, "evaluation.benchmarks")):
        path = f"evaluation.benchmarks[{number}]"
        if isinstance(name, str) and name.endswith(_DATA_FILES):
            check_place(path, name, (), server.data_roots, None)
        elif isinstance(name, str) and name not in EMBEDDED_TASKS and from_hub and not server.allow_hub:
            fault = "is a hub data set, which this server does not allow; set evaluation.data_root"
            refused.append((path, fault))
    refused += _unlisted(values, server)
    for section, key, urls in (
        ("verifier.rewards", "url", server.allowed_reward_urls),
        ("logging.trackers", "address", server.allowed_tracker_urls),  # the administrator's keys are sent there
    ):
        for number, part in enumerate(_items(values, section)):
            if isinstance(part, Mapping):
                check_address(f"{section}[{number}].{key}", part.get(key), urls)
    check_address("environment.url", setting(values, "environment.url"), server.allowed_environment_urls)
    agent = setting(values, "environment.name") == AGENT
    startable = sorted(plugins.allowed("environments", server.allowlists) or ())
    for name in ("environment.command", "environment.function") if agent else ():
        started = setting(values, name)
        started = shlex.join(map(str, started)) if isinstance(started, list | tuple) else started
        if started not in (None, "", "none", *startable):
            known = f"choose from {', '.join(startable) or 'none'}, which its administrator can extend"
            refused.append((name, f"is not allowed on this server; {known} by GXPO_ALLOWED_PLUGINS"))
    if setting(values, "placement.ray_address") not in (None, "none"):
        refused.append(("placement.ray_address", "is set by the service; remove it"))
    return refused


def _unlisted(values: Mapping[str, Any], server: ServiceSettings) -> Iterable[tuple[str, str]]:
    """Refusals of custom components that the administrator has not listed; none of them is imported for that."""
    for choice in CHOICES.values():
        section = setting(values, choice.section)
        listed = isinstance(section, list | tuple)
        for number, part in enumerate(section if listed else [section]):
            name = part.get(choice.key) if isinstance(part, Mapping) else part
            if not isinstance(name, str) or name in choice.built_in or not plugins.exists(choice.kind, name):
                continue
            if not plugins.is_allowed(choice.kind, name, server.allowlists):
                names = (*choice.built_in, *sorted(plugins.allowed(choice.kind, server.allowlists) or ()))
                yield (
                    f"{choice.section}{f'[{number}]' if listed else ''}.{choice.key}",
                    f"is not allowed on this server; choose from {', '.join(names)}, which its administrator can "
                    "extend by GXPO_ALLOWED_PLUGINS",
                )


def _place_fault(name: str, roots: tuple[Path, ...], *, hub: bool | None) -> str | None:
    """Why a folder, file or hub name is refused. hub: whether hub names are allowed; None where they mean nothing."""
    inside = f" inside {' or '.join(map(str, roots))}" if roots else ""
    try:
        path = Path(name).expanduser()
        is_path = name.startswith(_PATH_STARTS) or name.endswith(_DATA_FILES) or path.exists()
        if hub is not None and not is_path:
            if not hub:
                return f"is not a local path, and this server does not allow hub names; use a local copy{inside}"
            if not roots or _HUB_NAME.fullmatch(name):
                return None
        if not roots:
            return None
        if not path.is_absolute():
            return f"must be an absolute path{inside}" + (", or a hub name" if hub else "")
        real = Path(os.path.realpath(path))
    except (OSError, RuntimeError, ValueError) as error:  # too long, unknown home, or not a file name
        return f"is not a valid path ({error})"
    if any(real.is_relative_to(root) for root in roots):
        return None
    return f"is not allowed on this server; it must lie{inside}"


def _is_inner_name(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and not name.startswith("~") and "\\" not in name


def _items(config: Mapping[str, Any], path: str) -> Sequence[Any]:
    """The list at a dotted path, as far as a config accepts it; empty where there is none."""
    value = setting(config, path)
    return value[:_MOST_ITEMS] if isinstance(value, list | tuple) else ()


def setting(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of a config; None where there is none."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


_LONGEST_MODEL = 400
Settings = dict[str, Any]


def settings_of(source: RunSource, where: str = "") -> Settings:
    """Nested settings with the source's overrides applied, not yet validated.

    where: prefix of member names in errors, such as `base.`. Raises Invalid.
    """
    if source.preset is not None:
        try:
            values = plain(load_preset(source.preset).model_dump())
        except ConfigError as error:
            raise Invalid.of(f"{where}preset", str(error)) from None
    elif source.toml is not None:
        try:
            values = tomllib.loads(source.toml.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            raise Invalid.of(f"{where}toml", f"is not valid TOML: {error}") from None
    else:
        values = source.config or {}
    if unstorable := faults(values):
        raise invalid(_fields(unstorable))
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
    refused = refusals(values, server)
    places = {place for place, _ in refused}
    try:
        config = build(values)
    except BadSettings as error:
        others = [(place, reason) for place, reason in error.settings if place not in places]
        raise invalid(_fields([*others, *refused])) from None
    if len(config.model.path) > _LONGEST_MODEL:  # in the database
        refused.append(("model.path", f"must be at most {_LONGEST_MODEL} characters"))
    refused += _above_quotas(config, server)
    # These read the folders of model and data, which is allowed only where nothing has been refused.
    refused = refused or cannot_work(config, server) or cannot_fit(config, server)
    if refused:
        raise invalid(_fields(refused))
    return config


def invalid(errors: Sequence[FieldError]) -> Invalid:
    """All invalid settings as one error, without duplicates, sorted by name."""
    unique = {(error.field, error.message): error for error in errors}
    ordered = sorted(unique.values(), key=lambda error: error.field)
    named = "; ".join(f"{error.field}: {error.message}" for error in ordered[:5])
    return Invalid(named + ("; …" if len(ordered) > 5 else ""), errors=ordered)


def _above_quotas(config: RunConfig, server: ServiceSettings) -> list[tuple[str, str]]:
    """Quotas that the run exceeds even alone, so that it could never start."""
    cpus, gpus = resources(config)
    if config.placement.device == "auto" and server.quota_gpus == 0:
        gpus = 0.0  # it runs on CPUs there
    refused = []
    for what, asked, quota in (("CPUs", cpus, server.quota_cpus), ("GPUs", gpus, server.quota_gpus)):
        # Logical CPUs are sums of fractions.
        if quota is not None and asked > quota and not math.isclose(asked, quota):
            bound = f"all runs together may use {quota:g} (GXPO_QUOTA_{what.upper()})"
            refused.append(("placement", f"needs {asked:g} {what}, and {bound}; lower placement.* or raise the quota"))
    return refused


def _fields(refused: Sequence[tuple[str, str]]) -> list[FieldError]:
    return [FieldError(field=f"config.{path}" if path else "config", message=message) for path, message in refused]


def stored(config: RunConfig) -> Settings:
    """The complete config as JSON values; `RunConfig.model_validate` restores it."""
    body: Settings = plain(config.model_dump(mode="json"))
    return body


class PresetView(BaseModel):
    """A config preset."""

    name: str = Field(examples=["demo"])
    summary: str = Field(description="Purpose.")
    toml: str = Field(description="The complete run file.")
    config: dict[str, Any] = Field(description="The config as nested settings.")


router = APIRouter(route_class=ServiceRoute, tags=["groups"], responses=responses(401, 422, 503))


@router.get("/schema", summary="The config's JSON schema")
def get_schema(_: Viewer) -> dict[str, Any]:
    """Every setting with its type, default and description."""
    return config_schema()


@router.get("/presets", summary="Config presets")
def list_presets(_: Viewer) -> list[PresetView]:
    """Presets to submit unchanged or to start from."""
    return presets()


@router.get("/published", summary="The paper's results")
def get_published(_: Viewer) -> PublishedPaper:
    """Tables of the GXPO paper, with the paper's own grader, templates and problem sets."""
    return gxpo_paper()


def config_schema() -> dict[str, Any]:
    """The JSON schema of a config, with the custom settings classes that this server allows."""
    return _schema(tuple(settings for choice in CHOICES.values() for settings in choice.known()))


@functools.cache
def _schema(_known: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    return RunConfig.model_json_schema()


@functools.cache
def presets() -> list[PresetView]:
    """Every preset; the leading comment of its text is the summary."""
    views = []
    for name, text in sorted(preset_texts().items()):
        config = load_preset(name)
        comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
        summary = " ".join(line.removeprefix("#").strip() for line in comment)
        views.append(PresetView(name=name, summary=summary, toml=to_toml(config, [summary]), config=stored(config)))
    return views
