"""The Compare view, and Benchmarks, which selects runs in the same way."""

from __future__ import annotations

import pytest
from streamlit.testing.v1 import AppTest
from support.dashboard_pages import Pages
from support.reporting import evaluation_row, metric_row

from gxpo_dashboard.labels import plain


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
