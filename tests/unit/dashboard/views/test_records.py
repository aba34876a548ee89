"""Log of the Run view."""

from __future__ import annotations

from gxpo_dashboard.views.records import in_context


def test_matches_of_a_log_are_marked_between_the_lines_around_them() -> None:
    lines = [f"line {number}" for number in range(12)]
    assert in_context(lines, "LINE 9") == (1, ["⋯", "  line 7", "  line 8", "▸ line 9", "  line 10", "  line 11"])
    assert in_context(lines, "line 1")[1][:4] == ["  line 0", "▸ line 1", "  line 2", "  line 3"]
    assert in_context(lines, "error") == (0, [])
