"""Parts of the Run view."""

from __future__ import annotations

from gxpo_dashboard.views.run import PARTS


def test_every_part_that_grows_during_a_run_is_refreshed() -> None:
    assert [name for name, (_, every) in PARTS.items() if every is None] == ["Config"]
