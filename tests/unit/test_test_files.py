"""Test files can be collected together."""

from __future__ import annotations

from collections import Counter
from pathlib import Path


def test_no_two_test_files_have_one_name() -> None:
    """Test folders are no packages: pytest imports a test by its file's name and refuses a second one."""
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
