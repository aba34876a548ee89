"""The Compare view, and Benchmarks, which selects runs in the same way."""

from __future__ import annotations

import pytest
from support.dashboard_pages import Pages


@pytest.mark.parametrize(("view", "most"), [("compare", 60), ("benchmarks", 8)])
def test_more_runs_than_a_view_shows_are_left_out_with_a_message(pages: Pages, view: str, most: int) -> None:
    runs = [pages.submit(f"{view} {number}", f"seed={number}") for number in range(most + 2)]
    page = pages.open(view, runs=runs)
    assert not page.exception
    assert page.query_params["runs"] == runs[:most]
    words = f"Showing the first {most} of {most + 2} runs."
    assert [warning.value for warning in page.warning] == [words]
    assert [warning.value for warning in page.run().warning] == [words]
    page.multiselect(key="in_runs").unselect(runs[0]).run()
    assert page.query_params["runs"] == runs[1:most]
    assert not page.warning
