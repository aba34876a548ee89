"""The code blocks of a page of the documentation, to be done as a reader does them."""

from __future__ import annotations

import os
import re
import shutil
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


def install(project: Path, site: Path) -> None:
    """Install a project into a folder, without a network; its entry points count where `site` is on PYTHONPATH."""
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *offline, "--target", os.fspath(site)]
    # A copy: the build leaves files next to the sources.
    copy = shutil.copytree(project, site.with_name(f"{site.name}-build"))
    subprocess.run([*command, os.fspath(copy)], check=True)


def install_the_rule(folder: Path) -> Path:
    """Write the project of tutorials/write-a-rule.md to `folder` and install it; the folder for PYTHONPATH."""
    for name, text in titled("tutorials/write-a-rule.md").items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    install(folder / "my-rules", folder / "site")
    return folder / "site"
