"""The Runs view: what is selected is acted on, and one refusal does not affect the other runs."""

from __future__ import annotations

from typing import Any

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest
from support.dashboard_pages import Pages, labelled, table_columns
from support.reporting import evaluation_row, metric_row
from support.site import RECORDINGS

from gxpo_dashboard.labels import plain


def select(pages: Pages, *runs: str, token: str | None = None, **query: str) -> AppTest:
    """The Runs view with selected runs."""
    return pages.open("runs", {"selection-runs-0": runs, "token": token or pages.token}, size="200", **query)


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
    columns = table_columns(page)
    assert columns["runs"] == ["2 of 28", "1", "1"]
    assert columns["step"] == ["2", "0", "0"]


def test_a_baseline_that_does_not_exist_leaves_the_table(pages: Pages) -> None:
    pages.submit("listed")
    page = pages.open("runs", base="r01gone0000000000000", size="200")
    assert not page.error
    assert "listed" in table_columns(page)["name"]
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


# The Compare view, and Benchmarks, which selects runs in the same way.


@pytest.mark.parametrize(("view", "most"), [("compare", 60), ("benchmarks", 8)])
def test_more_runs_than_a_view_shows_are_left_out_with_a_message(pages: Pages, view: str, most: int) -> None:
    runs = [pages.submit(f"{view} {number}", f"seed={number}") for number in range(most + 2)]
    page = pages.open(view, runs=runs)
    assert not page.exception
    assert page.query_params["runs"] == runs[:most]
    assert [toast.value for toast in page.toast] == [f"Showing the first {most} of {most + 2} runs."]


def test_a_single_configuration_is_no_success(pages: Pages) -> None:
    pages.start_comparisons()
    run = pages.submit("alone")
    pages.service.finish(run, [0.25, 0.5])
    page = pages.open("compare", runs=[run])
    assert [info.value for info in page.info if "only configuration" in info.value]
    assert not page.success


def test_runs_before_their_first_evaluation_are_no_error(pages: Pages) -> None:
    pages.start_comparisons()
    runs = [pages.submit(name) for name in ("early", "earlier")]
    page = pages.open("compare", runs=runs)
    assert not page.error
    assert [words for words in page.markdown if "Nothing to compare yet" in words.value]
    assert [caption.value for caption in page.caption if caption.value.startswith("Excluded: early:")]
    for run in runs:
        pages.service.finish(run, [0.25, 0.5])
    assert not [words for words in page.run().markdown if "Nothing to compare yet" in words.value]


def test_charts_of_a_sweep_show_the_selected_score(pages: Pages) -> None:
    pages.start_comparisons()
    body = {
        "name": "sweep",
        "base": {"preset": "demo"},
        "grid": {"learner.rule.k": [3, 5], "learner.rule.alpha": [0.4, 0.5]},
    }
    group = pages.http.post("/sweeps", json=body).raise_for_status().json()["group"]["id"]
    runs = [run["id"] for run in pages.http.get(f"/groups/{group}").raise_for_status().json()["runs"]]
    for number, run in enumerate(runs):
        scores = {"eval/average/pass@1": 0.1 * number, "eval/hard/pass@4": 0.2 * number}
        others = {"eval/average/pass@4": 0.9, "eval/hard/pass@1": 0.9}
        evaluation = evaluation_row(1, benchmark="hard", scores={"pass@1": 0.9, "pass@4": 0.2 * number})
        pages.service.report(run, metrics=[metric_row(1, **scores, **others)], evaluations=[evaluation])
    page = pages.open("compare", groups=group, score="pass@4", benchmark="hard")
    # 0.2 times 0 to 3.
    assert plain("Highest: 60.0% in") in summaries(page)["Parallel coordinates"]


def summaries(page: AppTest) -> dict[str, str]:
    """Title of each chart → its text alternative."""
    return {e.value.removeprefix("##### "): e.help for e in page.markdown if e.value[:6] == "##### "}
