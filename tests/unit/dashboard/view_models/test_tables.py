"""Tables of runs, plans and turns: what they contain, and files of them."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

import httpx
import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest

from gxpo_client.client import Client, ResponseCache, connect
from gxpo_dashboard import labels
from gxpo_dashboard.charts.base import Chart
from gxpo_dashboard.charts.scores import published_scores, score_table
from gxpo_dashboard.session import visitor
from gxpo_dashboard.view_models import tables
from gxpo_dashboard.views.records import in_context
from gxpo_dashboard.views.runs import SAVED
from gxpo_services.run_states import EXECUTING, RunState
from gxpo_services.runs import listing
from gxpo_trainer.errors import REASONS

Json = dict[str, Any]


def run(**fields: Any) -> Json:
    progress = {"fraction": 0.5, "steps": 15, "backward_passes": 45, "backward_passes_budget": 90, "seconds_left": 75}
    base = {
        "id": "r1", "name": "a", "state": "running", "rule": "gxpo", "rule_label": "GXPO K=5", "model": "m", "seed": 0,
        "score": 0.4, "score_best": 0.45, "reward": "NaN", "tags": ["t"],
    }  # fmt: skip
    return base | {"progress": progress | fields.pop("progress", {})} | fields


def test_a_row_of_the_list() -> None:
    row = tables.cells(run(reward=-0.034567, silent_s=34.0), baseline=run(score=0.45), trend="data:")
    assert (row["progress"], row["score"], row["trend"]) == ([50.0, True], "40.0%", "data:")
    assert (row["difference"], row["reward"]) == ("−5.0", "−0.0346")
    assert (row["passes"], row["left"], row["tags"]) == ("45 of 90", "1 min 15 s", [["t", "gray"]])
    assert row["state"] == [["▶ running", "blue"], ["! no heartbeat", "orange"]]
    assert tables.cells(run())["difference"] == "–", "without a baseline"
    bars = {state: tables.cells(run(state=state))["progress"][1] for state in ("failed", "cancelled", "succeeded")}
    assert bars == {"failed": False, "cancelled": False, "succeeded": True}
    easy = run(score=0.9, benchmarks=["word_problems"])
    assert tables.cells(run(benchmarks=["math500"]), baseline=easy)["difference"] == "–", "of other benchmarks"
    both = ["math500", "word_problems"]
    same = tables.cells(run(score=0.5, benchmarks=both), baseline=run(score=0.25, benchmarks=both[::-1]))
    assert same["difference"] == "+25.0"


def test_settings_and_metrics_are_columns() -> None:
    settings = {"a.b": [1], "c": 2, "d": True, "e": None, "f": "x"}
    row = tables.cells(run(metrics={"gate/z": "NaN", "m": 0.25}, settings=settings))
    assert [row[f"config:{name}"] for name in settings] == ["[1]", "2", "true", "–", "x"]
    assert (row["metric:gate/z"], row["metric:m"]) == ("–", "0.25")
    assert tables.further(["name", "metric:gate/z", "config:c"], tables.METRIC) == ["gate/z"]


def test_columns_without_a_value_are_hidden() -> None:
    rows = [tables.cells(run(tags=[], reason=reason)) for reason in (None, "")]
    assert tables.filled(rows, ["name", "tags", "reason", "reward", "score", "metric:m"], ["name"]) == ["name", "score"]


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "-a\r=1"]


def rows(frame: pd.DataFrame) -> list[list[str]]:
    return list(csv.reader(io.StringIO(tables.csv_file(frame).decode(), newline="")))


@pytest.mark.parametrize("name", FORMULAS)
def test_neither_a_cell_nor_a_header_of_a_table_is_a_formula(name: str) -> None:
    points = pd.DataFrame({"series": [name] * 2, "x": [0, 1], "y": [-0.5, float("nan")]})
    chart = Chart("key", "Title", {}, {"points": points}, "y over x", "summary", "note")
    assert rows(chart.table()) == [["Series", "X", "Value"], [f"'{name}", "0", "-0.5"], [f"'{name}", "1", ""]]
    scores = {"benchmark": "math500", "series": name, "step": 3, "y": 0.5, "low": 0.25, "high": 0.75}
    table = rows(score_table(pd.DataFrame([scores]), published_scores({})))
    assert table[1][table[0].index("Run")] == f"'{name}"


def test_the_verdict_of_a_plan_names_the_devices_or_the_setting_and_its_rows_mark_the_runs_own_rule() -> None:
    seconds = {"sampling": 30.0, "passes": 60.0, "look_ahead": 2.0, "step": 95.0}
    rule = {"label": "GXPO K=5", "own": True, "seconds": seconds, "backward_passes": 900, "hours": 7.5, "gpu_hours": 30}
    other = rule | {"label": "GRPO", "own": False, "hours": None, "gpu_hours": None}
    plan = {"device": "h100-80", "devices_needed": 4, "shared_devices": False, "fits": True, "rules": [rule, other]}
    assert tables.verdict(plan) == "Fits on 4 × h100-80."
    assert tables.verdict(plan | {"shared_devices": True}) == "Fits on 4 × h100-80, shared by learner and sampler."
    assert tables.verdict(plan | {"device": "cpu"}) == "Planned for a host without GPUs."
    refused = {"fits": False, "advice": "learner: needs 90.0 GiB; set learner.zero_stage = 3"}
    assert tables.verdict(plan | refused) == "Learner: needs 90.0 GiB; set learner.zero_stage = 3."
    assert tables.time_table(plan).values.tolist() == [
        ["GXPO K=5 (this run)", "30 s", "1 min 2 s", "1 min 35 s", "900", "7 h 30 min", "30"],
        ["GRPO", "30 s", "1 min 2 s", "1 min 35 s", "900", "–", "–"],
    ]


def test_the_time_of_a_sweep_is_that_of_its_runs_whichever_is_the_base() -> None:
    rules = [("GRPO", False, 40, 0.25), ("GXPO K=5", True, 120, 0.5)]
    columns = ("label", "own", "backward_passes", "hours")
    plan = {"rules": [dict(zip(columns, rule, strict=True)) for rule in rules]}
    passes = {"GXPO K=5": 240, "GRPO": 80, "GXPO K=3": 120}
    planned = [{"rule_label": label, "backward_passes": number} for label, number in passes.items()]
    words = "3 settings × 1 seed = 3 runs, about 2 h 0 min one after another"
    assert tables.sweep_words(planned, 1, plan) == tables.sweep_words(planned[::-1], 1, plan) == words
    # Hours or tokens may end a run before its passes do.
    assert (
        tables.sweep_words(planned[:2], 2, plan, by_passes=False)
        == "1 setting × 2 seeds = 2 runs, about 45 min 0 s one after another"
    )
    assert tables.sweep_words(planned, 3, None) == "1 setting × 3 seeds = 3 runs"


def test_facts_say_how_it_ended_and_where_the_reward_came_from() -> None:
    policy, rewarded = ({"speaker": "policy", "reward": reward} for reward in (None, 0.0))
    facts = {
        "ended by the environment, 15 of 20 tokens by the policy, reward from the verifier": {},
        "turn limit reached, 15 of 20 tokens by the policy, reward from the environment": {
            "turns": [policy, rewarded], "end": "max_turns",
        },
        "ended by the environment, 15 of 20 tokens by the policy, 2 rows of tokens, reward from the verifier": {
            "extra": {"branches": 1},
        },
        "environment timed out, 15 of 20 tokens by the policy": {"end": "timeout", "reward": None},
    }  # fmt: skip
    for words, fields in facts.items():
        item = {"turns": [policy], "end": "done", "length": 20, "sampled_length": 15, "reward": 1.0, **fields}
        assert tables.episode_facts(item) == words


def test_equal_answers_are_merged_and_the_worst_is_first() -> None:
    answered = [
        ("wrong", "4", 0.0), ("correct", "5", 1.0), ("wrong", "3", 0.0), ("wrong", "3", 0.0), ("error", "", None),
    ]  # fmt: skip
    items = [{"verdict": verdict, "extracted": answer, "reward": reward} for verdict, answer, reward in answered]
    assert [(group[0]["extracted"], len(group)) for group in tables.answers(items)] == [
        ("", 1), ("3", 2), ("4", 1), ("5", 1)
    ]  # fmt: skip
    shares = [(2, 8, 0.9), (0, 8, 0.2), (0, 8, 0.1), (1, 4, None)]
    groups = [{"correct": correct, "responses": of, "reward": reward} for correct, of, reward in shares]
    assert [group["reward"] for group in tables.worst_first(groups)] == [0.1, 0.2, None, 0.9]


def test_every_order_of_a_column_is_known_to_the_service_and_shown_in_that_column() -> None:
    assert {name for name in tables.ORDERED if not name.startswith(tables.METRIC)} <= set(listing.COLUMNS)
    assert (tables.ORDERED["score_best"], tables.ORDERED["metric:reward/mean"]) == ("best", "reward")
    assert tables.column("metric:m").order == "metric:m"
    assert (tables.column("config:a.b").label, tables.column("config:a.b").order) == ("a.b", "")


# Untrusted text is harmless, and states, reasons and runs have words.


@pytest.mark.parametrize(
    "text",
    [
        "[a](http://x)", "**b**", "<script>", ":red[c]", "$x$", "# d", "`e`", "~~f~~", "![g](h)", "| i |", "1. j",
        "&lt;", "a -> b", "<- --", "x >= 1", "<-> <= ~=",
    ],
)  # fmt: skip
def test_markdown_is_escaped(text: str) -> None:
    escaped = labels.plain(text)
    for mark in "[]()*<>:$#`~!|&":
        assert escaped.count(mark) == escaped.count(f"\\{mark}")
    assert escaped.replace("\\", "").replace("\u2060", "") == text
    # As Streamlit's own plugin, in text that the page has parsed.
    assert not re.search(r"(^|\s)(<->|->|<-|--|>=|<=|~=)(\s|$)", escaped.replace("\\", ""))


def _without_points() -> None:  # run as a script without this module's imports
    import pandas as pd

    from gxpo_dashboard.charts.base import Chart
    from gxpo_dashboard.widgets import chart

    chart(Chart("key", "Title", {}, {"points": pd.DataFrame()}, "alt", "Shut off: **b** not yet."), "scope")


def test_the_summary_of_a_chart_without_points_is_escaped() -> None:
    page = AppTest.from_function(_without_points).run(timeout=60)
    assert [caption.value for caption in page.caption] == [labels.plain("Shut off: **b** not yet.")]


def _zoomed() -> None:
    import streamlit as st

    from gxpo_dashboard.charts.base import AXES, Plot, metric_chart
    from gxpo_dashboard.widgets import chart

    st.session_state["axis"] = "step"
    for x in AXES:
        chart(metric_chart(Plot(x, x, {"reward/mean": "mean"}, "reward"), {}, x), "scope")


def test_a_part_without_points_of_a_live_series_leads_to_the_reset() -> None:
    page = AppTest.from_function(_zoomed)
    page.query_params |= {"from": "3", "to": "5"}
    others = ["No data\\."] * 3
    assert [caption.value for caption in page.run(timeout=60).caption] == [
        "No points in the visible range. Reset the zoom.",
        *others,
    ]


def _archived() -> None:
    from gxpo_dashboard.views import runs

    runs._nothing(dict.fromkeys(("text", "state", "rule", "tag", "group"), ""), False)


@pytest.mark.parametrize(("items", "title"), [([], "No runs yet"), ([{"id": "r1"}], "All runs are archived")])
def test_a_list_without_its_archived_runs_is_told_from_one_without_any(
    items: list[Json], title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.params["archived"] == "any"
        return httpx.Response(200, json={"items": items})

    http = connect("http://127.0.0.1:8000", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(visitor, "client", lambda: Client(http, "token"))
    page = AppTest.from_function(_archived).run(timeout=60)
    assert page.markdown[0].value == f"#### {title}"


def test_addresses_do_not_become_links() -> None:
    for text in ("http://x.org", "see www.x.org", "mail a@b.org"):
        escaped = labels.plain(text).replace("\\", "")
        assert not any(mark in escaped for mark in ("://", "www.", "@b"))


def test_formulas_are_set_and_everything_else_stays_text() -> None:
    rendered = labels.with_formulas("so $x^2$ and **bold** [link](http://a)")
    assert rendered.startswith("so $x^2$ and ")
    assert r"\*\*bold\*\*" in rendered
    assert r"\[link\]" in rendered
    assert labels.with_formulas(r"\[ \frac{1}{2} \] done") == r"$\frac{1}{2}$ done"
    assert labels.with_formulas("from $5 to $6, not $ 7 $") is None
    assert labels.with_formulas(r"$\href{javascript:alert(1)}{x}$") is None
    assert labels.with_formulas("$`x`$") is None
    assert labels.with_formulas(r"open \( and \[ then \(x\)") == r"open \\\( and \\\[ then $x$"
    assert labels.with_formulas(r"\[a \\[2pt] b\]") == r"$a \\[2pt] b$"


def test_words_that_differ_have_a_background_and_all_text_is_escaped() -> None:
    assert labels.differing("12*7 = 84", "12+7 = 84") == r"12:orange-background[\*]7 \= 84"
    assert labels.differing("one two\nthree four", "one\nthree four") == "one :orange-background[two]  \nthree four"
    assert labels.differing("same", "same") == "same"
    long = " ".join(f"word{number}" for number in range(2000))
    assert labels.differing(f"{long} 4 {long}", f"{long} 5 {long}") == f"{long} :orange-background[4] {long}"
    # Comparing these would take minutes.
    assert labels.differing("so " * 400 + "4\n\\*", "the so " * 200) == "so " * 400 + "4  \n" + r"\\\*"


def test_every_state_and_reason_has_words() -> None:
    assert set(labels.STATES) == set(RunState)
    assert set(REASONS) <= set(labels.REASONS)


def test_the_active_runs_are_those_that_execute_or_wait() -> None:
    assert set(SAVED["Active"]["state"]) == {*EXECUTING, RunState.QUEUED}


def test_names_that_repeat_are_told_apart() -> None:
    views = {
        "r000001": {"name": "a", "seed": 0}, "r000002": {"name": "a", "seed": 1}, "r000003": {"name": "b", "seed": 0},
        "r000004": {"name": "c", "seed": 0}, "r000005": {"name": "c", "seed": 0},
    }  # fmt: skip
    assert list(labels.unique_labels(views).values()) == [
        "a (seed 0)", "a (seed 1)", "b", "c (000004)", "c (000005)"
    ]  # fmt: skip
    views["r000003"]["name"] = "a (seed 1)"
    assert list(labels.unique_labels(views).values()) == [
        "a (000001)", "a (000002)", "a (seed 1) (000003)", "c (000004)", "c (000005)"
    ]  # fmt: skip


def test_the_download_of_a_log_leaves_the_cache_of_the_session() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        offset = int(request.url.params["offset"])
        return httpx.Response(200, json={"text": "ab"[offset : offset + 1], "next_offset": offset + 1})

    cache = ResponseCache()
    service = Client(connect("http://127.0.0.1:8000", transport=httpx.MockTransport(answer)), "token", cache)
    assert visitor.whole_log(service, "r1") == b"ab"
    assert not cache.answers


def test_matches_of_a_log_are_marked_between_the_lines_around_them() -> None:
    lines = [f"line {number}" for number in range(12)]
    assert in_context(lines, "LINE 9") == (1, ["⋯", "  line 7", "  line 8", "▸ line 9", "  line 10", "  line 11"])
    assert in_context(lines, "line 1")[1][:4] == ["  line 0", "▸ line 1", "  line 2", "  line 3"]
    assert in_context(lines, "error") == (0, [])
