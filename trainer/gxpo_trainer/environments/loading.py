"""Loads the environment of a run file (gxpo_trainer/plugins.py tells what may be imported).

An environment behind an OpenEnv server: one WebSocket connection is one episode.

The protocol is that of OpenEnv 0.10: JSON messages on `/ws`. Out: `{"type": "reset", "data": …}`, `{"type": "step",
"data": action}`. In: `{"type": "observation", "data": {"observation": …, "reward": …, "done": …}}`, or
`{"type": "error", "data": {"message": …, "code": …}}`. The session ends with the connection, which ends with this
process. Why OpenEnv's own client is not used: docs/decisions/0011-environments.md.
"""

from __future__ import annotations

import importlib
import json
import shlex
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from gxpo_trainer import plugins
from gxpo_trainer.environments.contract import MAX_TEXT, Environment, Observation, Problem, Turn
from gxpo_trainer.errors import ConfigError

URLS = "GXPO_ENVIRONMENT_URLS"


class OpenEnvEnvironment:
    """Sends the policy's text as one field of an action, and shows the observation as JSON or one field of it."""

    def __init__(self, url: str, action_field: str, observation_field: str | None) -> None:
        parts = urlsplit(url)
        scheme = "wss" if parts.scheme == "https" else "ws"
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._address = f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}/ws"
        self._action_field, self._observation_field = action_field, observation_field
        self._connection: Any = None

    def reset(self, problem: Problem, seed: int) -> Observation:
        """The problem's text, and the server's first observation where it has one. The server gets the seed, the fields
        of the problem's row, and `problem` and `gold`, and takes those that it has parameters for."""
        from websockets.sync.client import connect

        # No time limits: the process is killed at environment.deadline_s. With a socket of ours, `connect` follows no
        # redirect and asks no proxy.
        ours = socket.create_connection((self._host, self._port))
        self._connection = connect(self._address, sock=ours, open_timeout=None, max_size=8 * MAX_TEXT)
        given = {**problem.extra, "problem": problem.text, "gold": problem.gold, "seed": seed}
        shown = self._shown(self._ask("reset", given)["observation"])
        return Observation.of_text("\n\n".join(text for text in (problem.text, shown) if text))

    def step(self, action: str) -> Turn:
        answer = self._ask("step", {self._action_field: action})
        return Turn(self._shown(answer["observation"]), answer.get("reward"), answer.get("done", False))

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        self._connection.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._connection.recv())
        match answer:
            case {"type": "observation", "data": {"observation": _} as body}:
                return dict(body)
            case {"type": "error", "data": {"code": code, "message": message}}:
                raise RuntimeError(f"the server answers {kind} with {code}: {message}")
        raise RuntimeError(f"the answer to {kind} is no observation of OpenEnv: {answer!r:.100}")

    def _shown(self, observation: Any) -> str:
        """The observation as text for the policy; empty where it has nothing."""
        if self._observation_field is None:
            return json.dumps(observation, ensure_ascii=False) if observation else ""
        if not isinstance(observation, dict) or self._observation_field not in observation:
            fields = ", ".join(observation) if isinstance(observation, dict) else "none"
            raise RuntimeError(
                f"environment.observation_field = {self._observation_field!r} is no field of the observation; "
                f"it has {fields}"
            )
        value = observation[self._observation_field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


AGENT = "agent"
OWN_CLASSES = {"calculator": "gxpo_trainer.environments.calculator:Calculator"}


def check_allowed(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for a class or an address that is not allowlisted. Imports nothing.

    settings: those of EnvironmentConfig.
    """
    name = settings["name"]
    if settings["url"] is not None:
        plugins.check_address("environment.url", settings["url"], URLS)
        return
    started = shlex.join(settings.get("command", ())) or settings.get("function")
    listed = plugins.allowed("environments")
    if name == AGENT and listed is not None and started not in listed:
        raise ConfigError(
            f"environment: the agent {started!r} is not allowed on this machine; its administrator can list it in the "
            f"environment variable {plugins.ALLOWLIST_OF_KIND['environments']} (now {', '.join(sorted(listed))})"
        )
    if name not in (AGENT, *OWN_CLASSES):
        try:
            plugins.check_allowed("environments", name)
        except ConfigError as error:
            raise ConfigError(f"environment.name: {name!r} {error}") from None


def load_agent(settings: Mapping[str, Any]) -> Callable[[dict[str, Any]], Any] | None:
    """What `environment.function` names, if anything. Raises ConfigError."""
    check_allowed(settings)
    if not settings["function"]:
        return None
    try:
        function: Callable[[dict[str, Any]], Any] = plugins.import_class(settings["function"])
    except ConfigError as error:
        raise ConfigError(f"environment.function: {settings['function']!r} {error}") from error
    return function


def load_environment(settings: Mapping[str, Any]) -> Callable[[], Environment]:
    """What creates the environment of an episode. settings: those of EnvironmentConfig. Raises ConfigError."""
    check_allowed(settings)
    name = settings["name"]
    if settings["url"] is not None:
        try:
            importlib.import_module("websockets.sync.client")  # here, so that no episode has to
        except ImportError as error:
            raise ConfigError(
                f"environment.name = {name!r} needs websockets ({error}); install gxpo[openenv]"
            ) from None
        return partial(OpenEnvEnvironment, settings["url"], settings["action_field"], settings["observation_field"])
    try:
        create: Callable[[], Environment] = (
            plugins.import_class(OWN_CLASSES[name])
            if name in OWN_CLASSES
            else plugins.factory("environments", settings)
        )
    except ConfigError as error:
        raise ConfigError(f"environment.name: {name!r} {error}") from error
    chosen = create.func if isinstance(create, partial) else create
    if problem := plugins.class_problem("environments", chosen, has_settings=chosen is not create):
        raise ConfigError(f"environment.name: {name!r} is no environment: {problem}")
    return create
