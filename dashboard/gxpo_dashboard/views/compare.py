"""Compare view: configurations at equal cost."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import streamlit as st

from gxpo_client.errors import InvalidRequest
from gxpo_client.formats import by_reason, number_of
from gxpo_dashboard.charts import scores as charts
from gxpo_dashboard.charts.base import COMPARED_AXES, MUTED, with_colors
from gxpo_dashboard.labels import TERMINAL, plain, unique_labels
from gxpo_dashboard.session import permalinks, visitor
from gxpo_dashboard.views import explorer
from gxpo_dashboard.widgets import axis, chart, download, draw_first, empty, text_table

Json = dict[str, Any]

SHARES = {"": "measured", "0.25": "25%", "0.5": "50%", "0.7": "70%", "0.8": "80%", "0.9": "90%", "0.95": "95%"}
_MOST = 60
_MOST_LINES = 20
_GATE_Z = "gate/z"


def show() -> None:
    header = st.container(horizontal=True, vertical_alignment="center", gap="small")
    header.title("Compare", width="content")
    with visitor.guarded():
        with header.popover("Select runs", icon=":material/checklist:"):
            runs = explorer.runs("Runs", "runs", most=_MOST)
            recent = {item["id"]: item for item in visitor.client().get("/groups", limit=200)["items"]}
            offered = explorer.with_selected(recent, "groups", "/groups")
            names = {
                id: {"name": f"{item['name']} ({number_of(item['num_runs'], 'run')})"} for id, item in offered.items()
            }
            groups = permalinks.multi("Groups", "groups", unique_labels(names), placeholder="sweeps")
        if not runs and not groups:
            empty(
                "Nothing selected",
                "Press *Select runs*, or select rows in **Runs** and press *Compare*. Runs that differ only in name "
                "and seed form one configuration.",
            )
            return
        everything = runs | _members(groups)
        with header:
            evaluated = _evaluated(everything)
            query = _controls(everything, list(runs), groups, evaluated)
        going = any(run["state"] not in TERMINAL for run in everything.values())
        refreshing = st.fragment(run_every=visitor.SLOW_S if going else None)
        refreshing(_comparison)(query, everything, awaited=not evaluated)
        for group in groups:
            refreshing(_sweep)(group, {name: query[name] for name in ("metric", "benchmark")})
        _metrics(everything, query["x"])
        st.markdown("#### Export")
        with st.container(horizontal=True):
            for form in ("csv", "jsonl"):
                label = f"metrics and evaluations ({form.upper()})"
                fetch = partial(visitor.client().export, list(runs), form, groups)
                download(label, f"gxpo-{form}.zip", fetch, f"export-{form}")


def _members(groups: list[str]) -> dict[str, Json]:
    """The runs of groups by id, tuning runs of studies last: they are not compared."""
    runs = [run for group in groups for run in visitor.client().get("/groups", group)["runs"]]
    runs.sort(key=lambda run: (run["group_values"] or {}).get("stage") == "ladder")
    return {run["id"]: run for run in runs}


def _evaluated(everything: dict[str, Json]) -> list[list[str]]:
    """The parts of the names of evaluation metrics: `eval`, benchmark and score."""
    # Runs of a sweep are evaluated alike: one of them is asked, or any while none is known to have an evaluation.
    evaluated = [run for run in reversed(everything.values()) if run["score_step"] is not None]
    asked = list({run["group"] or run["id"]: run["id"] for run in evaluated}.values() or everything)[:_MOST_LINES]
    metrics = {name for run in asked for name in visitor.client().metric_names(run)}
    return [name.split("/") for name in metrics if name.startswith("eval/")]


def _controls(everything: dict[str, Json], runs: list[str], groups: list[str], parts: list[list[str]]) -> Json:
    """The query of the comparison. parts: of `_evaluated`; without any, what the URL has is offered too."""
    scores = charts.sorted_scores(part[2] for part in parts if len(part) == 3)
    scores = scores or charts.sorted_scores({"pass@1", *st.query_params.get_all("score")})
    benchmarks = sorted({part[1] for part in parts} - {"average"}) or st.query_params.get_all("benchmark")
    baselines = unique_labels({"": {"name": f"most accurate {visitor.rules().baseline.label}"}} | everything)
    averaged = {"": "average of all"} | {name: name for name in benchmarks}
    x = axis("over", "backward_passes", COMPARED_AXES)
    with st.popover("Settings", icon=":material/tune:"):
        baseline = permalinks.select("Baseline", "baseline", baselines, "")
        metric = permalinks.select("Score", "score", scores, scores[0])
        benchmark = permalinks.select("Benchmark", "benchmark", averaged, "")
        share = permalinks.select(
            "Sampling share",
            "share",
            SHARES,
            "",
            help="Share of a baseline step that sampling takes: decides where a look-ahead pays (table below).",
        )
    return {
        "runs": runs,
        "groups": groups,
        "baseline": baseline,
        "metric": metric,
        "benchmark": benchmark,
        "x": x,
        "smoothing": permalinks.smoothing(),
        "sampling_share": float(share) if share else None,
        "gates": False,
    }


def _compared(query: Json) -> Json:
    """The comparison; with the default baseline where the selected run cannot be one."""
    try:
        return visitor.client().get("/compare", **query)
    except InvalidRequest as error:
        reasons = [message for field, message in error.errors if field == "baseline"]
        if not reasons:
            raise
        st.caption(f"Using the default baseline, because {plain(reasons[0])}")
        return visitor.client().get("/compare", **{**query, "baseline": ""})


def _comparison(query: Json, everything: dict[str, Json], *, awaited: bool) -> None:
    """Headline, ranking, curves, evidence, tables and gates. awaited: whether the controls have no benchmark to offer
    yet."""
    with visitor.guarded():
        grown = _members(query["groups"]).keys() - everything.keys()
        if grown or (awaited and _evaluated(everything)):
            st.rerun()  # only the whole page can add runs of a sweep or study, and what the controls offer
        try:
            comparison = _compared(query)
        except InvalidRequest as error:
            if not error.left_out:
                raise
            words = (
                "Runs are compared from their first evaluation on: before step 1, unless `evaluation.at_start = false`."
            )
            empty("Nothing to compare yet", words)
            _excluded(error.left_out)
            return
        headline, *evidence = comparison["evidence"].splitlines()
        box, icon = (st.success, "check_circle") if comparison["conclusive"] else (st.info, "help")
        box(plain(headline), icon=f":material/{icon}:")
        first = {group["name"]: run for group in comparison["groups"] if (run := group["runs"][0])["id"] in everything}
        ranking, *tables = comparison["tables"]
        colors = _colors(first, everything)
        dots = [colors.get(name, MUTED) for name in comparison["ranking"]]
        text_table(charts.text_table(ranking), ranking["title"], colors=dots)
        drawn = charts.most_accurate(comparison, _MOST_LINES)
        if len(drawn["groups"]) < len(comparison["groups"]):
            shown = f"Showing {len(drawn['groups'])} of {len(comparison['groups'])} configurations"
            st.caption(f"{shown}: the most accurate, and the baseline.")
        chart(with_colors(charts.comparison_chart(drawn, query["x"]), colors), "compare")
        draw_first()
        with st.container(border=True):
            st.markdown("##### Evidence")
            st.markdown("\n".join(f"- {plain(line)}" for line in evidence))
            _excluded(comparison["left_out"])
        for table in tables:
            text_table(charts.text_table(table), table["title"])
        if comparison["differences"]:  # the last table
            st.caption("These make the comparison unfair; hardware affects only hours.")
        settings = charts.settings_table(comparison)
        if not settings.empty:
            text_table(settings, "Differing settings")
        _gates(comparison, everything)


def _gates(comparison: Json, everything: dict[str, Json]) -> None:
    """Gate z-scores of as many runs as a session caches."""
    gated = {series: run for series, run in charts.gates(comparison).items() if run["id"] in everything}
    drawn = dict(list(gated.items())[:_MOST_LINES])
    views = {run["id"]: everything[run["id"]] for run in drawn.values()}
    series = visitor.live_series_of(views, "step", (_GATE_Z,), aligned=True)
    z = {run: points for run, of_run in series.items() if (points := of_run.points.get(_GATE_Z))}
    z = {run: points.without(everything[run]["warm_steps"], "step") for run, points in z.items()}
    if z:
        if len(drawn) < len(gated):
            st.caption(f"Showing the gates of {_MOST_LINES} of {len(gated)} runs.")
        chart(with_colors(charts.gate_chart(drawn, z), _colors(drawn, everything)), "compare")


def _excluded(left_out: list[Json], reason: str = "Excluded") -> None:
    for name, why in by_reason((run["name"], run["reason"]) for run in left_out):
        st.caption(f"{reason}: {plain(name)}: {plain(why)}")


def _colors(runs: Mapping[str, charts.Response], everything: dict[str, Json]) -> dict[str, str]:
    """Series → colour of the rule of its run. runs: by series."""
    return visitor.rules().colors({series: everything[run["id"]]["rule"] for series, run in runs.items()})


def _sweep(group: str, score: Json) -> None:
    """The heat map of two settings that the visitor selects, which changes with evaluations."""
    with visitor.guarded():
        heat_map = visitor.client().heat_map(group, **score)
        if heat_map is None:
            return
        with st.container(border=True):
            st.markdown("##### Sweep")
            settings = heat_map["settings"]
            with st.container(horizontal=True, vertical_alignment="bottom"):
                x = permalinks.select("Columns", f"hx-{group}", settings, heat_map["x"])
                y = permalinks.select("Rows", f"hy-{group}", settings, heat_map["y"])
                show = permalinks.select("Show", f"hs-{group}", charts.CELL_VALUES, "final")
            if x == y:
                st.caption("Select two different settings.")
                return
            heat_map = visitor.client().heat_map(group, x=x, y=y, show=show, **score)
            if heat_map is not None:
                chart(charts.heat_map_chart(heat_map), "heat")
                _excluded(heat_map["left_out"], "Not in the grid")


def _metrics(everything: dict[str, Json], x: str) -> None:
    """Training metrics of the runs."""
    st.markdown("#### Training metrics")
    runs = dict(list(everything.items())[:_MOST_LINES])
    if len(runs) < len(everything):
        st.caption(f"Showing {_MOST_LINES} of {len(everything)} runs.")
    going = any(run["state"] not in TERMINAL for run in runs.values())
    st.fragment(run_every=visitor.LIVE_S if going else None)(visitor.guarded()(explorer.show))(runs, x, aligned=True)
