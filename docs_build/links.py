"""Checks what a strict build of the site does not: the navigation, pictures and other files that Markdown names, and
that no page loads anything from another host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_REMOTE = re.compile(
    r"""<(?:script|link|img|source|iframe)\b[^>]*?\b(?:src|srcset|href)=["']?((?:https?:)?//[^"'\s>]*)"""
)
"""Address on another host that a browser fetches when it shows the page."""
_REMOTE_STYLE = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]*)""")
_MARKDOWN_LINK = re.compile(r"""\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)\"""")


def problems_of_site(site: Path) -> list[str]:
    """One line per address on another host that a page or style sheet would load."""
    files = [
        (path, pattern)
        for ending, pattern in (("html", _REMOTE), ("css", _REMOTE_STYLE))
        for path in sorted(site.rglob(f"*.{ending}"))
    ]
    return [
        f"{path.relative_to(site)}: loads {address} from another host"
        for path, pattern in files
        for address in pattern.findall(path.read_text(encoding="utf-8"))
    ]


def pages_of_navigation(navigation: Any) -> Iterator[str]:
    """The pages that `nav` of zensical.toml names, in order."""
    if isinstance(navigation, str):
        yield navigation
    for part in navigation.values() if isinstance(navigation, dict) else navigation:
        if not isinstance(navigation, str):
            yield from pages_of_navigation(part)


def problems_of_navigation(navigation: Any, docs: Path) -> list[str]:
    """Pages that are missing in the navigation, or named there and do not exist."""
    named = list(pages_of_navigation(navigation))
    exist = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    problems = [f"nav: {page} does not exist" for page in named if page not in exist]
    problems += [f"nav: {page} occurs twice" for page in sorted({page for page in named if named.count(page) > 1})]
    return problems + [f"{page} is not in nav of zensical.toml" for page in sorted(exist - set(named))]


def problems_of_markdown(file: Path, root: Path) -> list[str]:
    """Relative links and pictures of a Markdown file that lead to no file."""
    addresses = [urlsplit(match[1] or match[2]) for match in _MARKDOWN_LINK.finditer(file.read_text(encoding="utf-8"))]
    return [
        f"{file.relative_to(root)}: {address.path} does not exist"
        for address in addresses
        if address.path
        and not address.netloc
        and not (address.scheme or (file.parent / unquote(address.path)).exists())
    ]
