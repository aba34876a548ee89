"""The Runs view: what is selected is acted on, and one refusal does not affect the other runs."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest
from support.dashboard_pages import Pages, labelled


def select(pages: Pages, *runs: str, token: str | None = None, **query: str) -> AppTest:
    """The Runs view with selected runs."""
    return pages.open("runs", {"chosen_runs": list(runs), "token": token or pages.token}, size="200", **query)


def test_selected_runs_are_cancelled_after_a_confirmation(pages: Pages) -> None:
    runs = [pages.submit("to cancel", f"seed={seed}") for seed in range(2)]
    page = select(pages, *runs)
    labelled(page.button, "Cancel").click().run()
    assert [pages.state(run) for run in runs] == ["queued", "queued"]
    labelled(page.button, "Cancel 2 runs").click().run()
    assert [pages.state(run) for run in runs] == ["cancelled", "cancelled"]


def test_a_run_that_may_not_be_deleted_does_not_keep_the_others(pages: Pages) -> None:
    token = pages.service.token("submitter")
    owners = {"mine": token, "of another": None, "gone": token, "mine too": token}
    runs = {name: pages.submit(name, token=owner) for name, owner in owners.items()}
    for run in runs.values():
        pages.cancel(run)
    page = select(pages, *runs.values(), token=token)
    labelled(page.button, "Delete…").click().run()
    pages.http.delete(f"/runs/{runs['gone']}").raise_for_status()
    labelled(page.button, "Delete 4 runs").click().run()
    assert [pages.state(run) for run in runs.values()] == ["deleted", "cancelled", "deleted", "deleted"]
    refusals = [error.value for error in page.error]
    assert len(refusals) == 1
    assert refusals[0].startswith("of another")
    assert labelled(page.button, "Delete run")
