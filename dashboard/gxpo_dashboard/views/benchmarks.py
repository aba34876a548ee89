"""Benchmarks view: evaluation scores over training."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st

from gxpo_client.errors import Refused
from gxpo_dashboard.charts import scores as charts
from gxpo_dashboard.charts.base import COMPARED_AXES, with_colors
from gxpo_dashboard.labels import TERMINAL, plain, unique_labels
from gxpo_dashboard.session import permalinks, visitor
from gxpo_dashboard.views import explorer
from gxpo_dashboard.widgets import axis, chart, empty, grid, text_table

Json = dict[str, Any]
MOST_RUNS = 8


def show() -> None:
    header = st.container(horizontal=True, vertical_alignment="center", gap="small")
    header.title("Benchmarks", width="content")
    with visitor.guarded():
        with header.popover("Select runs", icon=":material/checklist:"):
            runs = explorer.runs("Runs", "runs", most=MOST_RUNS)
        if not runs:
            empty(
                "No runs selected",
                "Press *Select runs*. Runs are evaluated first, last and every `evaluation.every_steps` steps.",
            )
            return
        metrics = _scores(runs)
        going = any(view["state"] not in TERMINAL for view in runs.values())
        if not metrics:
            first = "The first one runs before step 1, unless `evaluation.at_start` is false."
            words = first if going else "The runs ended without one."
            if any(visitor.client().evaluations(run) for run in runs):
                words = "No evaluation after the warm start."
            empty("No evaluations", words)
            if going:
                st.fragment(run_every=visitor.SLOW_S)(_await_evaluation)(runs)
            return
        published = charts.published_scores(visitor.client().get("/published"))
        with header:
            x = axis("over", "backward_passes", COMPARED_AXES, smoothed=False)
            with st.popover("Settings", icon=":material/tune:"):
                metric = permalinks.select("Score", "score", metrics, metrics[0])
                models = {"": "none"} | {model: model for model in published["model"]}
                model = permalinks.select("Published results", "published", models, "")
        published = published[published["model"] == model]
        st.fragment(run_every=visitor.SLOW_S if going else None)(_body)(runs, x, metric, published)


def _evaluations(run: Json) -> list[Json]:
    """Those from the end of a warm start on, with their steps counted from there, as in comparisons."""
    warm_steps, rows = run["warm_steps"], visitor.client().evaluations(run["id"])
    return [row | {"step": row["step"] - warm_steps} for row in rows if row["step"] >= warm_steps]


def _scores(runs: dict[str, Json]) -> list[str]:
    return charts.sorted_scores(name for run in runs.values() for row in _evaluations(run) for name in row["scores"])


def _await_evaluation(runs: dict[str, Json]) -> None:
    """Draw the page again once a run has an evaluation."""
    with visitor.guarded():
        if _scores(runs):
            st.rerun()


def _body(runs: dict[str, Json], x: str, metric: str, published: pd.DataFrame) -> None:
    labels = unique_labels(runs)
    with visitor.guarded():
        with suppress(Refused):  # a run without an evaluation yet
            if len(runs) == 1:
                parts = visitor.client().get("/runs", *runs, "headline")["parts"]
                # Its accuracies are pass@1.
                accuracies = () if metric == "pass@1" else ("evaluation", "comparison")
                headline = " ".join(part["text"] for part in parts if part["topic"] not in accuracies)
            else:
                headline = visitor.client().get("/compare", runs=list(runs), metric=metric, gates=False)["evidence"]
            st.info(plain(headline.partition("\n")[0]), icon=":material/help:")
        frames = [charts.scores_frame(_evaluations(view), metric, labels[run], x) for run, view in runs.items()]
        frame = pd.concat(frames, ignore_index=True)
        if metric != "pass@1" and not published.empty:
            st.caption("Published results are sampled pass@1 and are hidden for other scores.")
            published = published.iloc[0:0]
        names = list(labels.values())
        colors = visitor.rules().colors({labels[run]: view["rule"] for run, view in runs.items()})
        drawn = [
            with_colors(charts.benchmark_chart(name, frame, metric, names, published, x, permalinks.span(x)), colors)
            for name in dict.fromkeys(frame["benchmark"])
        ]
        grid(drawn, partial(chart, scope="-".join(runs)[:80]))
        text_table(charts.score_table(frame, published), f"{metric} summary")
        if any(view["warm_steps"] for view in runs.values()):
            st.caption("Steps are counted from the end of a warm start.")
        if not published.empty:
            st.caption(
                "Published: arXiv 2605.06755, Table 1, sampled pass@1 with 16 responses at temperature 1. Grader, "
                "templates and versions of the problem sets are the paper's own."
            )
