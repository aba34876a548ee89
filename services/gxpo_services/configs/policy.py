"""Server policy for configs: allowed folders, hub names, code and Ray address.

Paths are checked after resolving `~`, `..` and symbolic links. Nothing is URL-decoded, as in the file system. The check
works on plain nested values, so that policy violations are reported together with validation errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from gxpo_services.settings import ServiceSettings
from gxpo_trainer.config.environment import OWN_ENVIRONMENTS
from gxpo_trainer.config.model import STARTER_POLICIES
from gxpo_trainer.config.verifier import OWN_REWARDS

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
"""Narrower than what the trainer tries on the hub: no part of a name may be `.` or `..`, which are folders."""
_PATH_STARTS = ("/", "~", "./", "../")
_DATA_FILES = (".jsonl", ".parquet", ".json", ".csv")
_EMBEDDED_TASK = "word_problems"
Refusals = list[tuple[str, str]]


def refusals(values: Mapping[str, Any], settings: ServiceSettings) -> Refusals:
    """(dotted path, reason and fix) of every setting that this server does not allow. values: nested settings, possibly
    incomplete; wrong types are left to the config's validation."""
    return [
        *_model(values, settings),
        *_data(values, settings),
        *_evaluation(values, settings),
        *_rewards(values, settings),
        *_environment(values, settings),
        *_placement(values),
    ]


def _model(values: Mapping[str, Any], settings: ServiceSettings) -> Iterable[tuple[str, str]]:
    yield from _place(values, "model.path", STARTER_POLICIES, settings.model_roots, hub=settings.allow_hub)
    if setting(values, "model.trust_remote_code") not in (None, False) and not settings.allow_remote_code:
        yield "model.trust_remote_code", "is not allowed on this server; set it to false"


def _data(values: Mapping[str, Any], settings: ServiceSettings) -> Iterable[tuple[str, str]]:
    yield from _place(values, "data.source", (_EMBEDDED_TASK,), settings.data_roots, hub=settings.allow_hub)
    for name in ("split", "subset"):
        # Both become parts of file names below data.source.
        part = setting(values, f"data.{name}")
        if isinstance(part, str) and not _is_inner_name(part):
            yield f"data.{name}", "must be a relative path inside the data set, without .."


def _evaluation(values: Mapping[str, Any], settings: ServiceSettings) -> Iterable[tuple[str, str]]:
    yield from _place(values, "evaluation.data_root", ("none",), settings.data_roots, hub=None)
    root = setting(values, "evaluation.data_root")
    names = setting(values, "evaluation.benchmarks")
    for number, name in enumerate(names if isinstance(names, list | tuple) else ()):
        if not isinstance(name, str) or name == _EMBEDDED_TASK:
            continue
        fault = None
        if name.endswith(".jsonl"):
            fault = _place_fault(name, settings.data_roots, hub=None)
        elif root in (None, "none") and not settings.allow_hub:
            fault = "is a hub data set, which this server does not allow; set evaluation.data_root"
        if fault is not None:
            yield f"evaluation.benchmarks[{number}]", fault


def _rewards(values: Mapping[str, Any], settings: ServiceSettings) -> Iterable[tuple[str, str]]:
    rewards = setting(values, "verifier.rewards")
    for number, reward in enumerate(rewards if isinstance(rewards, list | tuple) else ()):
        name = reward.get("name") if isinstance(reward, Mapping) else None
        if isinstance(name, str) and name not in OWN_REWARDS and name not in settings.allowed_rewards:
            allowed = ", ".join((*OWN_REWARDS, *settings.allowed_rewards))
            yield f"verifier.rewards[{number}].name", f"is not allowed on this server; choose from {allowed}"
        url = reward.get("url") if isinstance(reward, Mapping) else None
        if isinstance(url, str) and url not in settings.allowed_reward_urls:
            known = ", ".join(settings.allowed_reward_urls) or "none"
            yield f"verifier.rewards[{number}].url", f"is not an allowed address on this server; choose from {known}"


def _environment(values: Mapping[str, Any], settings: ServiceSettings) -> Iterable[tuple[str, str]]:
    name, url = setting(values, "environment.name"), setting(values, "environment.url")
    if isinstance(name, str) and name not in (*OWN_ENVIRONMENTS, *settings.allowed_environments):
        allowed = ", ".join((*OWN_ENVIRONMENTS, *settings.allowed_environments))
        yield "environment.name", f"is not allowed on this server; choose from {allowed}"
    if isinstance(url, str) and url not in settings.allowed_environment_urls:
        known = ", ".join(settings.allowed_environment_urls) or "none"
        yield "environment.url", f"is not an allowed address on this server; choose from {known}"


def _placement(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    if setting(values, "placement.ray_address") not in (None, "none"):
        yield "placement.ray_address", "is set by the service; remove it"


def _place(
    values: Mapping[str, Any], path: str, embedded: Collection[str], roots: tuple[Path, ...], *, hub: bool | None
) -> Iterable[tuple[str, str]]:
    """The refusal of a setting that names a place, unless its value is one of `embedded`."""
    name = setting(values, path)
    fault = _place_fault(name, roots, hub=hub) if isinstance(name, str) and name not in embedded else None
    if fault is not None:
        yield path, fault


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


def setting(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of a config; None where there is none."""
    found: Any = config
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
