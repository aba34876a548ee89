"""`gxpo` and what it prints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gxpo_trainer import cli


class Gxpo:
    """The command line in this process: returns its exit code."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.printed = capsys.readouterr

    def __call__(self, *words: object) -> int:
        return cli.main([str(word) for word in words])

    def out(self, *words: object) -> str:
        """What a command that succeeds prints."""
        assert self(*words) == 0
        return self.printed().out

    def json(self, *words: object) -> Any:
        return json.loads(self.out(*words, "--json"))

    def error(self, code: int, *words: object) -> str:
        """What a command that fails with this code prints."""
        assert self(*words) == code
        return self.printed().err

    def submit(self, name: str, *words: str) -> str:
        """Submit a run with a name; its id."""
        return self.out("submit", "--preset", "demo", "--name", name, *words).strip()
