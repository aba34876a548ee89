"""Checks a built site and the repository's own Markdown: every link leads somewhere, every page can be reached, and
nothing is loaded from another host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LOADING = {("script", "src"), ("link", "href"), ("img", "src"), ("source", "srcset"), ("iframe", "src")}
"""Elements whose address a browser fetches when it shows the page."""
ERROR_PAGE = "404.html"
_CSS_ADDRESS = re.compile(r"""(?:url\(|@import)\s*["']?(?:https?:)?//""")
_MARKDOWN_LINK = re.compile(r"""\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)\"""")


@dataclass
class Page(HTMLParser):
    """The addresses and the anchors of an HTML file."""

    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)
            elif (tag, name) in LOADING:
                self.loaded.append(value)
            elif (tag, name) == ("a", "href"):
                self.links.append(value)


def read_page(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def problems_of_site(site: Path, start: str = "index.html") -> list[str]:
    """One line per broken link, unreachable page, and address on another host that a page would load."""
    pages = {path: read_page(path) for path in sorted(site.rglob("*.html"))}
    problems, reached = [], {site / start, site / ERROR_PAGE}
    leads: dict[Path, set[Path]] = {path: set() for path in pages}
    for path, page in pages.items():
        where = path.relative_to(site)
        for address in [*page.links, *page.loaded]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if address in page.loaded and parts.scheme != "data":
                    problems.append(f"{where}: loads {address} from another host")
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            if path.name == ERROR_PAGE and parts.path.startswith("/"):
                continue
            if not target.is_file():
                problems.append(f"{where}: {address} does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                problems.append(f"{where}: {address} names no heading of {target.relative_to(site)}")
            leads[path].add(target)
    waiting = [site / start]
    while waiting:
        for target in leads.get(waiting.pop(), set()) - reached:
            reached.add(target)
            waiting.append(target)
    problems += [f"{path.relative_to(site)}: no link leads here" for path in pages if path not in reached]
    styles = sorted(site.rglob("*.css"))
    problems += [f"{path.relative_to(site)}: loads from another host" for path in styles if _remote(path)]
    return problems


def _remote(style: Path) -> bool:
    return _CSS_ADDRESS.search(style.read_text(encoding="utf-8")) is not None


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
    """Relative links of a Markdown file outside the site that lead to no file of the repository."""
    problems = []
    for match in _MARKDOWN_LINK.finditer(file.read_text(encoding="utf-8")):
        address = urlsplit(match[1] or match[2])
        if address.scheme or address.netloc or not address.path:
            continue
        if not (file.parent / unquote(address.path)).exists():
            problems.append(f"{file.relative_to(root)}: {address.path} does not exist")
    return problems
