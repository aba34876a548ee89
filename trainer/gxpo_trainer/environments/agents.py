"""The process of an episode that is an agent, with a loop and tools of its own (gateway.py answers it)."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import resource
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

MAX_FILES = 4096
"""Open files and connections of each process of an agent, so that none takes those of the gateway."""


def play(channel: socket.socket, settings: Mapping[str, Any], function: Callable[[dict[str, Any]], Any] | None) -> int:
    """Run the agent until it ends; its exit code. A command takes the place of this process.

    channel: the problem with address and key comes first, as a line of JSON; then it is the agent's standard error.
    settings: those of AgentConfig. function: what `environment.function` names.
    """
    with channel, channel.makefile("rb") as lines:
        given = json.loads(lines.readline())
        os.dup2(channel.fileno(), 2)
    files = min(MAX_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    os.environ |= {"OPENAI_BASE_URL": given["base_url"], "OPENAI_API_KEY": given["api_key"]}
    try:
        if settings["url"]:
            _post(settings["url"], given)
        elif function is not None:
            if inspect.isawaitable(result := function(given["problem"])):
                asyncio.run(result)  # type: ignore[arg-type]
        else:
            problem = os.memfd_create("problem")
            os.write(problem, json.dumps(given["problem"]).encode())
            os.lseek(problem, 0, os.SEEK_SET)
            os.dup2(problem, 0)
            os.execvp(settings["command"][0], settings["command"])
        return 0
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return 0
        traceback.print_exc()
        return 1
    finally:
        sys.stderr.flush()


def _post(address: str, given: Mapping[str, Any]) -> None:
    """Have a running agent play the episode; its answer is the end."""
    url = urlsplit(address)
    connection = (HTTPSConnection if url.scheme == "https" else HTTPConnection)(url.netloc)  # follows no redirect
    connection.request("POST", url.path or "/", json.dumps(given), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if not 200 <= response.status < 300:
        raise RuntimeError(f"{address} answers {response.status} {response.reason}")
    response.read()
