"""No page was committed with the marks of an unresolved merge. In code and settings they are syntax errors."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = re.compile("^(<{7}|={7}|>{7})( |$)", re.MULTILINE)


def test_no_page_has_conflict_marks() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert len(pages) > 50
    assert [page for page in pages if MARK.search(page.read_text(encoding="utf-8"))] == []
