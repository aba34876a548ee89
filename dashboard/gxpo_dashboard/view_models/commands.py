"""Submissions of the dashboard as commands that do the same. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any


def curl(url: str, path: str, body: Mapping[str, Any]) -> str:
    """A POST request to a path of the API as a curl command, with the token from the environment."""
    quoted = json.dumps(body, indent=2).replace("'", "'\\''")
    return (
        f"curl -X POST {url.rstrip('/')}/api/v1{path} \\\n"
        '  -H "Authorization: Bearer $GXPO_TOKEN" \\\n'
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d '{quoted}'"
    )


def sweep_command(body: Mapping[str, Any]) -> str:
    """A sweep as a `gxpo sweep` command on the file run.toml, which has its base config."""
    options = [("--name", body["name"])]
    options += [("--grid", f"{path}={','.join(map(_typed, found))}") for path, found in body["grid"].items()]
    if body["seeds"]:
        options.append(("--seeds", ",".join(map(str, body["seeds"]))))
    options += [(f"--{name}", str(value)) for name in ("preset", "priority") if (value := body[name])]
    if body["tags"]:
        options.append(("--tags", ",".join(body["tags"])))
    words = [f"{name} {shlex.quote(value)}" for name, value in options] + (["--control"] if body["control"] else [])
    return " \\\n  ".join(["gxpo sweep run.toml", *words])


def _typed(value: Any) -> str:
    """A value as the command line and `values` read it."""
    return str(value).lower() if isinstance(value, bool) else str(value).replace("Infinity", "inf")
