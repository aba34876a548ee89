"""The Runs view: what is selected is acted on, and one refusal does not affect the other runs."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

import streamlit as st
from streamlit.testing.v1 import AppTest
from support.dashboard_pages import Pages, labelled
from support.reporting import metric_row
from support.site import RECORDINGS

from gxpo_dashboard.view_models.tables import RowSelection


def select(pages: Pages, *runs: str, token: str | None = None, **query: str) -> AppTest:
    """The Runs view with selected runs, as the browser reports a selection of all rows of a table of these."""
    selection = RowSelection()
    selection.place(runs)
    selection.report(range(len(runs)))
    return pages.open("runs", {"selection-runs-0": selection, "token": token or pages.token}, size="200", **query)


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


def test_the_order_is_that_of_the_service_in_address_and_header(pages: Pages) -> None:
    for name, accuracies in (("late", [0.1, 0.4]), ("early", [0.9, 0.2])):
        rows = [metric_row(step, **{"eval/average/pass@1": score}) for step, score in enumerate(accuracies)]
        pages.service.report(pages.submit(name, tags=["order"]), metrics=rows)

    def table(page: AppTest) -> tuple[list[str], list[str]]:
        frame, config = page.dataframe[0], json.loads(page.dataframe[0].proto.columns)
        return [unquote(name).partition("#")[2] for name in frame.value["name"]], [
            part["label"] for part in config.values() if "label" in part and part["label"][-1] in "↓↑"
        ]

    page = pages.open("runs", tag="order", sort="score_best")
    assert table(page) == (["early", "late"], ["Best ↓"])
    assert "best" in page.dataframe[0].proto.column_order
    page = pages.open("runs", tag="order", sort="score", order="asc")
    assert table(page) == (["early", "late"], ["Accuracy ↑"])


def test_means_are_over_all_pages_and_over_runs_that_succeeded(pages: Pages) -> None:
    tag: dict[str, Any] = {"tags": ["means"]}
    for seed, steps in enumerate((1, 3)):
        pages.service.finish(pages.submit("same", f"seed={seed}", **tag), [0.5] * (steps + 1))
    pages.submit("same", "seed=2", **tag)
    pages.submit("other", "timeouts.sampling_s=10", "seed=0", **tag)
    pages.submit("other", "environment.max_turns=7", "seed=0", **tag)
    # A page of the list has 25 runs: the first ones of the configuration are on the second page.
    for seed in range(3, 28):
        pages.submit("same", f"seed={seed}", **tag)
    page = pages.open("runs", rows="seeds", tag="means", size="25", cols=["name", "step", "seed"])
    frame = page.dataframe[0].value
    assert frame["runs"].tolist() == ["2 of 28", "1", "1"]
    assert frame["step"].tolist() == [2.0, 0.0, 0.0]


def test_a_baseline_that_does_not_exist_leaves_the_table(pages: Pages) -> None:
    pages.submit("listed")
    page = pages.open("runs", base="r01gone0000000000000", size="200")
    assert not page.error
    assert "listed" in "".join(page.dataframe[0].value["name"])
    assert [caption.value for caption in page.caption if "does not exist" in caption.value]


def test_metrics_of_a_later_run_are_offered_as_columns(pages: Pages) -> None:
    page = pages.open("runs")
    assert "gate/z" not in labelled(page.multiselect, "Columns").options
    pages.service.replay(RECORDINGS / "demo", name="with metrics")
    st.cache_data.clear()  # in place of the time for which the names of metrics are kept
    assert "gate/z" in labelled(pages.open("runs").multiselect, "Columns").options


def test_the_view_opens_while_the_service_does_not_answer(pages: Pages) -> None:
    page = pages.open("submit")
    pages.service.stop()
    try:
        labelled(page.button, "Runs").click().run()
        assert not page.exception
        assert [caption.value for caption in page.caption if "not responding" in caption.value]
    finally:
        pages.service.start()
