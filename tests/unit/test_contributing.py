"""The tree in CONTRIBUTING.md and the pages name files that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("trainer/gxpo_trainer", "services/gxpo_services", "client/gxpo_client", "dashboard/gxpo_dashboard")
NAME = r"(?:\{[^}]*\}|[^\s,{])+"
"""A path without blanks; commas in braces belong to it."""


def named() -> dict[str, set[str]]:
    """First-level paths of the tree with the names indented below them."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = text.split("## The tree")[1].split("```")[1].strip("\n")
    paths: dict[str, set[str]] = {}
    parent = ""
    for line in tree.splitlines():
        names = re.findall(NAME, re.match(rf"\s*{NAME}(, {NAME})*", line)[0])
        if line.startswith("  "):
            paths[parent] |= {name.rstrip("/") for name in names}
        else:
            for name in names:
                parent = name.rstrip("/")
                paths[parent] = set()
    return paths


def expanded(path: str) -> list[Path]:
    """`tests/{unit,gpu}` as its two paths."""
    match = re.fullmatch(r"(.*)\{(.*)\}(.*)", path)
    return [ROOT / f"{match[1]}{one}{match[3]}" for one in match[2].split(",")] if match else [ROOT / path]


def test_all_that_the_tree_names_exists() -> None:
    missing = [str(path) for top, below in named().items() for path in expanded(top) if not path.exists()]
    missing += [f"{top}/{name}" for top, below in named().items() for name in below if not (ROOT / top / name).exists()]
    assert missing == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tree_names_every_subpackage(package: str) -> None:
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert folders - named()[package] == set()


def test_every_source_file_that_a_page_names_exists() -> None:
    """`rules/gxpo.py` is meant from a package's root, `tests/…` and `benchmarks/…` from the repository's."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    source = re.compile(r"`((?:\w+/)+\w+\.py)`")
    named = {(page.name, path) for page in pages for path in source.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 20
    bases = [ROOT, *(ROOT / package for package in PACKAGES), *(ROOT / package.split("/")[0] for package in PACKAGES)]
    assert [(page, path) for page, path in sorted(named) if not any((base / path).exists() for base in bases)] == []
