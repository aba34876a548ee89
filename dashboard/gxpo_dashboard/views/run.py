"""Run view: progress and health of one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import streamlit as st

from gxpo_client.errors import NotFound
from gxpo_client.formats import NONE, age, duration, known, moment, number_of, share_done, significant
from gxpo_dashboard.charts import base, curves, steps
from gxpo_dashboard.charts.base import Chart, Plot
from gxpo_dashboard.charts.scores import accuracy_chart, sorted_scores
from gxpo_dashboard.labels import REASONS, TERMINAL, plain, state_chip
from gxpo_dashboard.session import permalinks, visitor
from gxpo_dashboard.view_models import forms
from gxpo_dashboard.view_models.rules import Rule
from gxpo_dashboard.view_models.series import Series, number
from gxpo_dashboard.view_models.tables import time_left
from gxpo_dashboard.views import actions, explorer, records, samples
from gxpo_dashboard.widgets import axis, chart, empty, grid, sentence

Json = dict[str, Any]

_LEARNED = (curves.REWARD, curves.COMPLETIONS, curves.WARM_START)
_NO_POINTS = "No points in the visible range."
OVERVIEW = (*(name for plot in _LEARNED for name in plot.metrics), *steps.GATE, *steps.PASSES)


def show() -> None:
    actions.dialogs()
    run: Json | None = None
    with visitor.guarded():
        missing = "No run selected"
        if requested := st.query_params.get("run", ""):
            try:
                run = visitor.client().run(requested)
            except NotFound:
                missing = f"There is no run {plain(requested)}"
        if run is None:
            st.title("Run")
            empty(missing, "Open one in **Runs**, or start one in **Submit**.")
    if run is None:
        return
    ended = run["state"] in TERMINAL
    st.fragment(run_every=None if ended else visitor.LIVE_S)(_header)(run["id"], ended)
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute", gap="small"):
        requested = st.query_params.get("part", "")
        if requested not in PARTS and any(requested in sections for sections in PARTS.values()):
            permalinks.write(address(requested))  # a link whose part is a section
        part = permalinks.choice("Part", "part", list(PARTS), next(iter(PARTS)), on_change=_leave_section)
        sections = PARTS[part]
        section = next(iter(sections))
        if len(sections) > 1:
            section = permalinks.choice("Section", "section", list(sections), section)
        x = axis("x", "step") if part in CHARTED else "step"
    draw, every = sections[section]
    st.fragment(run_every=None if ended else every)(visitor.guarded()(draw))(run["id"], x)


def address(section: str) -> dict[str, list[str]]:
    """The parameters that open a section, as the controls write them: none for the first of several."""
    part, sections = next((part, sections) for part, sections in PARTS.items() if section in sections)
    first = section == next(iter(sections))
    return {"part": [] if part == next(iter(PARTS)) else [part], "section": [] if first else [section]}


def _leave_section() -> None:
    """Write another part to the URL together with the end of the section, which that part does not have."""
    permalinks.write(address(next(iter(PARTS[st.session_state["in_part"]]))))


def _header(run_id: str, was_ended: bool) -> None:
    with visitor.guarded():
        run = visitor.client().run(run_id)
        if run["state"] in TERMINAL and not was_ended:
            st.rerun()
        progress = run["progress"]
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.title(plain(run["name"]), width="content")
            st.markdown(state_chip(run["state"]), width="content")
            if (silent_s := run.get("silent_s")) is not None:
                st.markdown(f":orange-badge[no heartbeat for {duration(silent_s)}]", width="content")
            st.space("stretch")
            actions.buttons(run, "run")
        made = run["created_at"]
        facts = [
            plain(run.get("rule_label") or run["rule"]),
            plain(run["model"]),
            f"seed {run['seed']}",
            f"by {plain(run['created_by'])}, {age(time.time() - made)} ({plain(moment(made))})",
            *[f":gray-badge[{plain(tag)}]" for tag in run["tags"]],
        ]
        st.markdown(" · ".join(facts))
        if run["notes"]:
            with st.expander("Notes", icon=":material/notes:", expanded=False):
                st.text(run["notes"])
        _headline(run)
        fraction = min(1.0, max(0.0, number(progress["fraction"] or 0.0)))
        figures = " · ".join(_figures(run, fraction))
        if run["state"] in ("failed", "cancelled"):  # a bar, perhaps a full one, would look like success
            st.markdown(figures)
        else:
            st.progress(fraction, text=figures)


_EVIDENCE = {"gate": "Gate", "evaluation": "Overview"}
"""The part of the view with a sentence's evidence, by its topic; Events for the others."""


def _headline(run: Json) -> None:
    """What became of the run; each sentence is a button that opens its evidence."""
    with st.container(horizontal=True, gap="small", key="headline"):
        for part in visitor.client().get("/runs", run["id"], "headline")["parts"]:
            topic, runs, text = part["topic"], part["runs"], plain(part["text"])
            if topic == "state" and run["state"] == "failed":
                # Text to copy, and what can be done.
                st.error(f"{text}\n\n{plain(REASONS.get(run['reason'], ''))}", icon=":material/error:")
            elif sentence(part, f"headline-{topic}"):
                if topic == "comparison":
                    permalinks.go("compare", runs=runs)
                own = "Overview" if runs else _EVIDENCE.get(topic, "Events")
                permalinks.go("run", run=next(iter(runs), run["id"]), **address(own))


def _figures(run: Json, fraction: float) -> list[str]:
    """What was used of each limit, and the time left where it is known."""
    progress, left = run["progress"], time_left(run)

    def used(cost: str, bound: str, what: str) -> str:
        spent, limit = number(progress[cost]), number(progress.get(bound) or 0)
        one, unit = number_of(spent, what).split(" ", 1)
        return f"**{one}** of {number_of(limit, what)}" if limit else f"**{one}** {unit}"

    hours = number(progress.get("hours_budget"))
    limit = f" of {duration(3600 * hours)}" if known(hours) else ""
    words = [
        f"**{share_done(fraction)}** of the budget",
        used("backward_passes", "backward_passes_budget", "backward pass"),
        *([used("tokens", "tokens_budget", "token")] if progress.get("tokens_budget") else []),
        f"**{duration(progress['training_s'])}**{limit} training time",
        f"reward **{significant(number(run['reward']))}**",
    ]
    if run["state"] not in {*TERMINAL, "queued"} and left != NONE:
        words.append(f"**{left}** left")
    return words


def _overview(run_id: str, x: str) -> None:
    run = visitor.client().run(run_id)
    series = visitor.live_series(run, x, OVERVIEW).points
    settings = forms.get(run["config"], "learner.rule") or {}
    evaluations = visitor.client().evaluations(run_id)
    if x != "step":  # before the end of a warm start all costs are 0
        evaluations = [record for record in evaluations if record["step"] >= run["warm_steps"]]
    span = permalinks.span(x)
    if not any(series.values()) and not evaluations:
        records.none(run_id, "data", _NO_POINTS if span else "")
        return
    scores = accuracy_chart(evaluations, "pass@1", x, span)
    supervised = forms.get(run["config"], "rollout.source") == "dataset"
    charts = [base.metric_chart(curves.COMPLETIONS if supervised else curves.REWARD, series, x), scores]
    # Over steps, whatever the x-axis: the warm start is at the beginning of all others.
    warm = series
    if x != "step" and run["warm_steps"]:
        warm = visitor.live_series(run, "step", tuple(curves.WARM_START.metrics)).points
    charts += base.metric_charts([curves.WARM_START], warm, "step")
    if (rule := visitor.rules().of(settings)).watched is not None:
        charts.append(steps.z_chart(series, x, settings.get("gate") or {}, rule.color, part=span is not None))
    charts.append(_budget(run, series, x))
    metrics = sorted_scores(name for record in evaluations for name in record["scores"])
    others = [metric for metric in metrics if metric != "pass@1"]
    charts += [accuracy_chart(evaluations, metric, x, span) for metric in others]
    _grid(charts, run)


def _grid(charts: list[Chart], run: Json) -> None:
    """Charts in shades of the colour of the run's rule."""
    rules, rule = visitor.rules(), str(run["rule"])
    tinted = [base.with_colors(item, rules.colors(dict.fromkeys(item.points["series"], rule))) for item in charts]
    grid(tinted, partial(chart, scope=run["id"]))


def _gate(run_id: str, x: str) -> None:
    run = visitor.client().run(run_id)
    settings = forms.get(run["config"], "learner.rule") or {}
    rule: Rule = visitor.rules().of(settings)
    series = visitor.live_series(run, x, OVERVIEW).points
    if not any(series.values()) and permalinks.span(x) is None:
        records.none(run_id, "data")
        return
    if rule.watched is None:
        empty(f"{rule.label} has no gate", f"Backward passes per step: {rule.passes_per_step(settings)}.")
    else:
        part = permalinks.span(x) is not None
        chart(steps.z_chart(series, x, settings.get("gate") or {}, rule.color, part=part), run_id)
        window = visitor.live_series(run, x, steps.WINDOW, joined=True).points
        chart(steps.value_chart({**series, **window}, x, rule.watched, rule.color), run_id)
    chart(_budget(run, series, x), run_id)


def _budget(run: Json, series: Series, x: str) -> Chart:
    """Backward passes over steps, whatever the x-axis: over themselves they would be a straight line. Those of a phase
    are counted from the first step, also of a part."""
    if x != "step" or permalinks.span(x) is not None:
        series = visitor.live_series(run, "step", (*steps.PASSES, "gate/active"), whole=True).points
    bound = run["progress"].get("backward_passes_budget")
    settings = forms.get(run["config"], "learner.rule") or {}
    budget = number(bound) if bound else None
    return steps.budget_chart(series, settings, budget, visitor.rules(), run["warm_steps"])


def _plots(plots: Iterable[Plot], run_id: str, x: str) -> None:
    run, names = visitor.client().run(run_id), tuple(name for plot in plots for name in plot.metrics)
    charts = base.metric_charts(plots, visitor.live_series(run, x, names).points, x)
    if charts:
        _grid(charts, run)
    else:
        otherwise = _NO_POINTS if permalinks.span(x) else "The run does not report these metrics."
        records.none(run_id, "data", otherwise)


def _system(run_id: str, x: str) -> None:
    times = visitor.live_series(visitor.client().run(run_id), "step", steps.TIMES, joined=True)
    timeline = visitor.client().get("/runs", run_id, "timeline", steps=4)["items"]
    if timeline:
        chart(steps.timeline_chart(timeline), run_id)
    if any(times.points.values()):
        chart(steps.step_time_chart(times.points, times.totals), run_id)
    _plots(curves.SYSTEM, run_id, x)


CHARTED = ("Overview", "Training", "System")
PARTS: dict[str, dict[str, tuple[Callable[[str, str], None], float | None]]] = {
    "Overview": {"Overview": (_overview, visitor.LIVE_S)},
    "Training": {
        "Gate": (_gate, visitor.LIVE_S),
        "Look-ahead": (partial(_plots, curves.LOOK_AHEAD), visitor.LIVE_S),
        "Policy": (partial(_plots, curves.POLICY), visitor.LIVE_S),
        "Metrics": (lambda run_id, x: explorer.show({run_id: visitor.client().run(run_id)}, x), visitor.LIVE_S),
    },
    "Samples": {"Samples": (samples.show, visitor.SLOW_S)},
    "System": {"System": (_system, visitor.LIVE_S)},
    "Details": {
        "Log": (records.log, visitor.LIVE_S),
        "Events": (records.events, visitor.SLOW_S),
        "Config": (records.config, None),
        "Checkpoints": (records.checkpoints, visitor.SLOW_S),
    },
}
"""Name of each part, its sections with their functions, and their refresh interval while the run executes."""
