"""Finds the environment class of a run file.

The author of a run file may not be trusted to run code on this machine. A class is therefore imported only if the
environment of this process, which the machine's administrator controls, lists it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gxpo_trainer.environments.base import Environment
from gxpo_trainer.environments.contract import class_problem
from gxpo_trainer.environments.openenv import OpenEnvEnvironment, check_url
from gxpo_trainer.errors import ConfigError

ALLOWLIST = "GXPO_ENVIRONMENT_ALLOWLIST"
OWN_CLASSES = {"calculator": "gxpo_trainer.environments.calculator:Calculator"}


def allowed_classes(environment: Mapping[str, str]) -> frozenset[str]:
    """The comma-separated entries `package.module:Class` of the allowlist."""
    return frozenset(name.strip() for name in environment.get(ALLOWLIST, "").split(",") if name.strip())


def check_allowed(settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Raises ConfigError for a class or an address that is not allowlisted. Imports nothing.

    settings: those of EnvironmentConfig.
    """
    name = settings["name"]
    if settings["url"] is not None:
        check_url(settings["url"], environment)
        return
    allowed = allowed_classes(environment)
    if name not in OWN_CLASSES and name not in allowed:
        raise ConfigError(
            f"environment.name: the class {name!r} is not allowed on this machine; its administrator can list "
            f"it in the environment variable {ALLOWLIST} (now {', '.join(sorted(allowed)) or 'empty'})"
        )


def load_environment(settings: Mapping[str, Any], environment: Mapping[str, str]) -> Callable[[], Environment]:
    """What creates the environment of an episode. settings: those of EnvironmentConfig. Raises ConfigError."""
    check_allowed(settings, environment)
    name = settings["name"]
    if settings["url"] is not None:
        try:
            importlib.import_module("websockets.sync.client")  # here, so that no episode has to
        except ImportError as error:
            raise ConfigError(
                f"environment.name = {name!r} needs websockets ({error}); install gxpo[openenv]"
            ) from None
        return partial(OpenEnvEnvironment, settings["url"], settings["action_field"], settings["observation_field"])
    path = OWN_CLASSES.get(name, name)
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # third-party code may raise anything
        raise ConfigError(
            f"environment.name: cannot import {name!r} ({type(error).__name__}: {error}); it must be a class on "
            "the import path of the machine that samples"
        ) from error
    if problem := class_problem(found):
        raise ConfigError(f"environment.name: {name!r} is no environment: {problem}")
    create: Callable[[], Environment] = found
    return create
