"""Increments give the same series as asking for everything."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, strategies as st
from streamlit.testing.v1 import AppTest

from gxpo_client.errors import ServiceUnavailable
from gxpo_dashboard.session import visitor
from gxpo_dashboard.view_models.rules import Rules
from gxpo_dashboard.view_models.series import BANDS, EVEN, NEVER_SMOOTHED, LiveSeries, Points, number, refresh
from gxpo_dashboard.views import explorer
from gxpo_services.outputs import metrics

Json = dict[str, Any]


class Service:
    """A run's metric as the service reports it: `rows` are (step, value)."""

    def __init__(self, rows: list[tuple[int, Any]] | None = None) -> None:
        self.rows, self.revision, self.requests = rows or [], 1, []

    def answer(self, after: int | None) -> Json:
        self.requests.append(after)
        kept = [(step, value) for step, value in self.rows if after is None or step > after]
        steps = [step for step, _ in kept]
        entry = {"x": [10.0 * step for step in steps], "y": [value for _, value in kept], "steps": steps}
        last = self.rows[-1][0] if self.rows else -1
        return {"revision": self.revision, "attempt": 1, "last_step": last, "series": {"m": entry}}

    def refresh(self, live: LiveSeries) -> None:
        refresh({"": live}, lambda _, after: {"": self.answer(after)})


def test_increments_start_one_step_before_the_newest_for_which_a_value_may_come_late() -> None:
    service, live = Service([(1, 0.1), (2, 0.2)]), LiveSeries()
    service.refresh(live)
    service.rows[1:] = [(2, 0.9), (3, 0.3)]
    service.refresh(live)
    service.refresh(live)
    assert service.requests == [None, 1, 2]
    assert live.points["m"] == Points([1, 2, 3], [10.0, 20.0, 30.0], [0.1, 0.9, 0.3])


def test_history_that_was_rewritten_is_fetched_again() -> None:
    service, live = Service([(step, 1.0) for step in range(1, 9)]), LiveSeries()
    service.refresh(live)
    service.rows, service.revision = [(1, 1.0), (2, 2.0), (3, 2.0)], 2
    service.refresh(live)
    assert (live.points["m"].steps, live.points["m"].y) == ([1, 2, 3], [1.0, 2.0, 2.0])
    assert service.requests[-1] is None


def test_what_grew_too_long_is_thinned_by_asking_again() -> None:
    service, live = Service([(step, 1.0) for step in range(1, 10)]), LiveSeries(max_points=10)
    service.refresh(live)
    service.rows += [(step, 1.0) for step in range(10, 22)]
    service.refresh(live)
    assert service.requests == [None, 8, None]


def thinned(steps: list[int], total: float | None = None, downsampled: bool = True) -> Json:
    """The service's answer with a thinned series; total: the sum of 1000 steps of a joined one."""
    entry: Json = {"x": steps, "y": [1.0] * len(steps), "steps": steps, "downsampled": downsampled}
    entry |= {} if total is None else {"sum": total, "count": 1000}
    return {"revision": 1, "attempt": 1, "last_step": steps[-1], "series": {"m": entry}}


def test_a_thinned_series_says_which_points_are_left_also_after_an_increment() -> None:
    live, joined = LiveSeries(), LiveSeries(joined=True)
    for series, total, kind in ((live, None, BANDS), (joined, 5.0, EVEN)):
        series.take(thinned([1, 999], total), None)
        series.take(thinned([999, 1000], total, downsampled=False), 998)
        assert (series.points["m"].steps, series.points["m"].thinned) == ([1, 999, 1000], kind)
        series.take(thinned([1, 2], total, downsampled=False), None)
        assert series.points["m"].thinned == ""


def test_a_band_stands_for_the_points_of_its_answer_and_later_points_follow_it() -> None:
    live, answer = LiveSeries(), thinned([1, 5, 8])
    answer["series"]["m"]["band"] = {"steps": [2, 6], "x": [2, 6], "mean": [1.5, "NaN"], "low": [1, 0], "high": [2, 0]}
    assert live.take(answer, None)
    assert live.take(thinned([8, 9], downsampled=False), 7)
    steps, _, means, *_ = zip(*live.points["m"].drawn, strict=True)
    assert (steps, means[0], means[2]) == ((2, 6, 9), 1.5, 1.0)
    assert math.isnan(means[1])
    assert not live.take(answer, 7), "a thinned increment would lose the points before it"


def test_an_average_is_told_from_what_is_never_smoothed() -> None:
    live = LiveSeries(smoothing=0.9)
    answer = thinned([1], downsampled=False)
    answer["series"] = dict.fromkeys(("reward/mean", "gate/z", "eval/average/pass@1"), answer["series"]["m"])
    live.take(answer, None)
    assert [points.smoothing for points in live.points.values()] == [0.9, 0.0, 0.0]
    assert set(NEVER_SMOOTHED) == set(metrics.NEVER_SMOOTHED)


def test_numbers_that_json_lacks() -> None:
    assert all(math.isnan(number(value)) for value in ("NaN", None, "words"))
    assert (number("-Infinity"), number(3)) == (-math.inf, 3.0)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_any_rhythm_of_refreshes_gives_the_whole_series(parts: list[int]) -> None:
    service, live, step = Service(), LiveSeries(), 0
    for part in parts:
        for _ in range(part):
            step += 1
            service.rows.append((step, step / 7))
        service.refresh(live)
    assert live.points["m"] == Points(
        list(range(1, step + 1)), [10.0 * s for s in range(1, step + 1)], [s / 7 for s in range(1, step + 1)]
    )


def test_several_runs_take_one_request_for_the_new_and_one_for_the_known_and_one_for_the_rewritten() -> None:
    services = {"a": Service([(1, 1.0), (2, 1.0), (3, 1.0)]), "b": Service([(1, 2.0)]), "c": Service([(5, 3.0)])}
    requests: list[tuple[list[str], int | None]] = []

    def fetch(runs: list[str], after: int | None) -> dict[str, Json]:
        requests.append((runs, after))
        return {run: services[run].answer(after) for run in runs}

    series = {"a": LiveSeries(), "b": LiveSeries()}
    refresh(series, fetch)
    series["c"] = LiveSeries()
    services["b"].rows.append((2, 4.0))
    refresh(series, fetch)
    assert requests == [(["a", "b"], None), (["c"], None), (["a", "b"], 0)]
    assert series["b"].points["m"].y == [2.0, 4.0]
    assert series["a"].points["m"].steps == [1, 2, 3]
    services["b"].rows, services["b"].revision = [(1, 9.0)], 2
    refresh(series, fetch)
    assert requests[-1] == (["b"], None)
    assert series["b"].points["m"].y == [9.0]


def _two_runs() -> None:  # run as a script without this module's imports
    import streamlit as st

    from gxpo_client.errors import ServiceUnavailable
    from gxpo_dashboard.session import visitor

    runs = {run: {"state": "running"} for run in st.session_state["runs"]}
    try:
        drawn = [bool(live.points) for live in visitor.live_series_of(runs, "step", ("m",)).values()]
    except ServiceUnavailable as error:
        drawn = str(error)
    st.session_state["drawn"] = drawn


def test_in_an_outage_what_is_known_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    service, known = Service([(1, 0.5)]), {"a", "b"}

    def metrics_of(ids: list[str], *_: Any, **__: Any) -> dict[str, Json]:
        if not known.issuperset(ids):
            raise ServiceUnavailable("no answer")
        return {run: service.answer(None) for run in ids}

    monkeypatch.setattr(service, "metrics_of", metrics_of, raising=False)
    monkeypatch.setattr(visitor, "client", lambda: service)
    page = AppTest.from_function(_two_runs)
    for runs, drawn in (("ab", [True, True]), ("ac", [True, False]), ("cd", "no answer")):
        page.session_state["runs"] = runs
        page.run(timeout=60)
        assert page.session_state["drawn"] == drawn


def _after_a_warm_start() -> None:
    import streamlit as st

    from gxpo_dashboard.views import explorer

    st.session_state["axis"] = "step"
    warm = {"a": 200, "b": 0}
    runs = {run: {"name": run, "state": "running", "rule": "grpo", "warm_steps": warm[run]} for run in "ab"}
    explorer.draw(runs, ("m",), "step", aligned=True)


def test_a_comparison_draws_no_step_of_a_warm_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a zoom, a crosshair and a step in a sentence are the same in all its charts."""
    charts, asked = [], []

    def metrics_of(ids: list[str], *_: Any, **part: Any) -> dict[str, Json]:
        asked.append((part.get("from"), part.get("to")))
        return {run: thinned([220, 300] if run == "a" else [20, 100], downsampled=False) for run in ids}

    service = Service()
    monkeypatch.setattr(service, "metrics_of", metrics_of, raising=False)
    monkeypatch.setattr(visitor, "client", lambda: service)
    monkeypatch.setattr(visitor, "rules", Rules)
    monkeypatch.setattr(explorer, "chart", lambda chart, _: charts.append(chart))
    page = AppTest.from_function(_after_a_warm_start)
    page.run(timeout=60)
    page.query_params |= {"from": "20", "to": "50"}
    page.run(timeout=60)
    assert not page.exception
    assert charts[0].points[["series", "x", "step"]].to_numpy().tolist() == [
        ["a", 20, 20], ["a", 100, 100], ["b", 20, 20], ["b", 100, 100],
    ]  # fmt: skip
    assert "from the end of a warm start" in charts[0].text
    assert asked == [(None, None), (20, 250)]
