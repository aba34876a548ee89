"""The code blocks of a page of the documentation, to be done as a reader does them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_NEEDS = re.compile(r"^# needs (?:an? )?(engine|GPU|service|token|network|Docker)\n")


@dataclass(frozen=True)
class Block:
    """language: of the fence. title: a file's name, `Output`, or none. needs: what the reader needs to run it."""

    language: str
    title: str | None
    text: str
    needs: str | None


def blocks(page: str) -> Iterator[Block]:
    """The blocks of docs/<page> that have a language, in order."""
    for language, title, text in _BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8")):
        needs = _NEEDS.match(text)
        yield Block(language, title or None, text, needs[1] if needs else None)


def titled(page: str) -> dict[str, str]:
    """Title → text of the blocks that have one."""
    return {block.title: block.text for block in blocks(page) if block.title and block.title != "Output"}


class Reader:
    """A reader in a folder of their own, with the environment that `make setup` made."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self._environment = {**os.environ, "PYTHONPATH": os.fspath(folder), **environment}
        (folder / ".venv").symlink_to(sys.prefix)

    def follow(self, page: str, needs: frozenset[str | None] = frozenset({None})) -> None:
        """Write the files of the page and run its commands, except those that need something else than `needs`.

        Each line of a block `Output` must be printed by the command before it. A page without a command to run fails.
        """
        printed, commands = "", 0
        for block in blocks(page):
            if block.title == "Output":
                missing = [line for line in block.text.splitlines() if line not in printed.splitlines()]
                assert not missing, f"{missing} not in\n{printed}"
            elif block.title:
                self.write(block.title, block.text)
            elif block.needs in needs and block.language in ("bash", "python"):
                printed, commands = self.run(block.language, block.text), commands + 1
        assert commands, f"nothing to run on {page}"

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def run(self, language: str, text: str, environment: Mapping[str, str] | None = None) -> str:
        """Run a block; what it printed, both streams."""
        command = ["bash", "-euo", "pipefail", "-c", text] if language == "bash" else [sys.executable, "-c", text]
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env={**self._environment, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, f"{text}\n{ended.stdout}"
        return ended.stdout


def tree_with_the_rule(folder: Path) -> None:
    """Do what tutorials/write-a-rule.md says to a copy of the trainer: `folder` is a clone with the rule in it."""
    page = titled("tutorials/write-a-rule.md")
    package = folder / "gxpo_trainer"
    (folder / "trainer").symlink_to(".")
    subprocess.run(["cp", "-r", os.fspath(ROOT / "trainer" / "gxpo_trainer"), os.fspath(package)], check=True)
    rule = "gxpo_trainer/rules/lookahead.py"
    (folder / rule).write_text(page[f"trainer/{rule}"], encoding="utf-8")
    rules = package / "config" / "rules.py"
    head, registry, rest = rules.read_text(encoding="utf-8").partition("RULES: list[type[RuleSettings]] = [\n")
    entries, end, rest = rest.partition("]\n")
    rules.write_text(
        head + page["settings"] + "\n\n" + registry + entries + page["registry"].removeprefix("+") + end + rest,
        encoding="utf-8",
    )
