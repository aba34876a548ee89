"""Run view: progress and health of one run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from gxpo_client.formats import NONE, count, duration, known, moment, percent, significant
from gxpo_dashboard.charts import curves, gate
from gxpo_dashboard.charts import steps as budget
from gxpo_dashboard.charts import steps as timeline
from gxpo_dashboard.charts import steps as timing
from gxpo_dashboard.charts.base import AXIS_WORDS, MUTED, Chart, axis_value, series_of, with_colors
from gxpo_dashboard.charts.benchmarks import accuracy_chart, metrics_of
from gxpo_dashboard.labels import TERMINAL, plain, state_chip, state_word, why
from gxpo_dashboard.session import permalinks, visitor
from gxpo_dashboard.view_models.rules import variants
from gxpo_dashboard.view_models.series import Series, number
from gxpo_dashboard.view_models.tables import time_left
from gxpo_dashboard.views import actions, explorer, records
from gxpo_dashboard.widgets import chart, charts_ahead, empty, grid, live

Json = dict[str, Any]

OVERVIEW = (*curves.REWARD, *gate.NAMES, *budget.NAMES)
SYSTEM = (
    *curves.GAP, *curves.MEMORY, *curves.GPU_LOAD, *curves.GPU_MEMORY, *curves.CPU, *curves.TRAFFIC, *curves.DISK,
    *timeline.SPAN_NAMES,
)  # fmt: skip
POLICY = (*curves.ENTROPY, *curves.KL, *curves.CLIP, *curves.LENGTH, *curves.FAILURES, *curves.TURNS, *curves.EPISODES)
RULE = (
    *curves.RETENTION, *curves.SCALE, *curves.COSINE, *curves.NORMS, *curves.FRACTIONS, *curves.UPDATE,
    *curves.TRAJECTORY,
)  # fmt: skip


@charts_ahead()
def show() -> None:
    actions.dialogs()
    run = _chosen()
    if run is None:
        return
    ended = run["state"] in TERMINAL
    live(lambda: _header(run["id"], ended), None if ended else visitor.LIVE_S)
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute", gap="small"):
        part = permalinks.choice("Part", "part", list(PARTS), "Overview")
        x = "step"
        if part in CHARTED:
            x = permalinks.choice("X-axis", "x", list(AXIS_WORDS), "step", format_func=AXIS_WORDS.__getitem__)
    every = None if ended else PARTS[part][1]
    live(lambda: _part(run["id"], part, x), every)


def _chosen() -> Json | None:
    """The run in the URL; otherwise a list to select from."""
    run = st.query_params.get("run", "")
    with visitor.guarded():
        if run:
            return visitor.client().run(run)
        st.title("Run")
        recent = visitor.client().runs(limit=20)["items"]
        if not recent:
            empty("No runs yet", "Open **Submit** to start one.")
            return None
        st.write("Select a run:")
        for item in recent:
            words = f"{state_word(item['state'])} · {item.get('rule_label') or item['rule']}"
            if st.button(f"{plain(item['name'])} · {plain(words)}", key=item["id"], width=520):
                st.query_params["run"] = item["id"]
                st.rerun()
    return None


def _header(run_id: str, was_ended: bool) -> None:
    with visitor.guarded():
        run = visitor.client().run(run_id)
        if run["state"] in TERMINAL and not was_ended:
            st.rerun()
        progress = run["progress"]
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.title(plain(run["name"]), width="content")
            st.markdown(state_chip(run["state"]), width="content")
            st.space("stretch")
            actions.buttons(run, "run")
        facts = [
            *([plain(run["phase"])] if run.get("phase") else []),
            plain(run.get("rule_label") or run["rule"]),
            plain(run["model"]),
            f"seed {run['seed']}",
            f"by {plain(run['created_by'])}, {plain(moment(run['created_at']))}",
            *[f":gray-badge[{plain(tag)}]" for tag in run["tags"]],
        ]
        st.markdown(" · ".join(facts))
        if run["notes"]:
            with st.expander("Notes", icon=":material/notes:", expanded=False):
                st.text(run["notes"])
        if run["state"] not in ("succeeded",) and (explained := why(run)):
            st.error(f"**{plain(run['reason'])}** {plain(explained)}", icon=":material/error:")
        if run["recoveries"]:
            st.caption(f"Recovered {run['recoveries']}×; see Events.")
        fraction = min(1.0, max(0.0, number(progress["fraction"] or 0.0)))
        st.progress(fraction, text=" · ".join(_figures(run, fraction)))


def _figures(run: Json, fraction: float) -> list[str]:
    return [
        f"**{percent(fraction, 0)}** of the budget",
        *_costs(run["progress"]),
        f"accuracy **{percent(number(run['score']))}**{_best(run)}",
        f"reward **{significant(number(run['reward']))}**",
        *_left(run),
    ]


def _costs(progress: Json) -> list[str]:
    """What was used of each cost, with its limit if there is one."""
    costs = [
        f"**{count(number(progress[used]))}**{_of(progress.get(bound))} {word}"
        for used, bound, word in (
            ("steps", "step_budget", "steps"),
            ("backward_passes", "backward_passes_budget", "backward passes"),
            ("tokens", "tokens_budget", "tokens"),
        )
        if used != "tokens" or progress.get(bound)
    ]
    hours = number(progress.get("hours_budget"))
    limit = f" of {duration(3600 * hours)}" if known(hours) else ""
    return [*costs, f"**{duration(progress['training_s'])}**{limit} training time"]


def _left(run: Json) -> list[str]:
    """The queue position of a queued run, else the time left where it is known."""
    words = time_left(run)
    if run["state"] in TERMINAL or words == NONE:
        return []
    return [words if run["progress"].get("queue_position") is not None else f"**{words}** left"]


def _of(bound: Any) -> str:
    return f" of {count(number(bound))}" if bound else ""


def _best(run: Json) -> str:
    best = number(run["score_best"])
    return f" (best {percent(best)})" if best == best else ""


def _part(run_id: str, part: str, x: str) -> None:
    with visitor.guarded():
        PARTS[part][0](run_id, x)


def _overview(run_id: str, x: str) -> None:
    run = visitor.client().run(run_id)
    series = visitor.live_series(run_id, x, OVERVIEW).points
    settings = curves.rule_of(run["config"])
    evaluations = visitor.client().evaluations(run_id)
    if not any(series.values()) and not evaluations:
        empty("No data yet", "The first step takes longest, because engines start and compile.")
        return
    charts = [curves.reward_chart(series, x), accuracy_chart(evaluations, "pass@1", x, evaluated_at(run_id, x))]
    if visitor.rules().of(settings).watched is not None:
        charts.append(gate.z_chart(series, x, _two_sided(settings), _phase_colors(settings)))
    _grid([*charts, _budget(run_id, series, x, run)], run)


def evaluated_at(run_id: str, x: str) -> dict[int, float] | None:
    """Step of each evaluation → its position on the x-axis; None on the axis of steps."""
    if x == "step":
        return None
    points = visitor.live_series(run_id, x, (EVALUATED,)).points.get(EVALUATED)
    return {step: axis_value(at, x) for step, at in zip(points.steps, points.x, strict=True)} if points else {}


def _phase_colors(settings: Any) -> gate.PhaseColors:
    rules = visitor.rules()
    return rules.of(settings).color, rules.fallback_color


def _grid(charts: list[Chart], run: Json) -> None:
    """Charts in shades of the colour of the run's rule."""
    color = visitor.rules().of(curves.rule_of(run["config"])).color
    tinted = [with_colors(found, variants(dict.fromkeys(series_of(found), color))) for found in charts]
    grid(tinted, run["id"])


def _gate(run_id: str, x: str) -> None:
    run = visitor.client().run(run_id)
    settings = curves.rule_of(run["config"])
    rule = visitor.rules().of(settings)
    series = visitor.live_series(run_id, x, OVERVIEW).points
    if rule.watched is None:
        empty(f"{rule.label} has no gate", f"Backward passes per step: {rule.passes_per_step(settings)}.")
    else:
        colors = _phase_colors(settings)
        tints = dict.fromkeys(("z-score", rule.watched), rule.color) | {"window mean": MUTED}
        chart(with_colors(gate.z_chart(series, x, _two_sided(settings), colors), tints), run_id)
        window = visitor.live_series(run_id, x, gate.WINDOW, joined=True).points
        chart(with_colors(gate.value_chart({**series, **window}, x, rule.watched, colors), tints), run_id)
    chart(_budget(run_id, series, x, run), run_id)


def _budget(run_id: str, series: Series, x: str, run: Json) -> Chart:
    """Backward passes over steps, whatever the x-axis: over themselves they would be a straight line."""
    over_steps = series if x == "step" else visitor.live_series(run_id, "step", (*budget.NAMES, "gate/active")).points
    bound = run["progress"].get("backward_passes_budget")
    settings = curves.rule_of(run["config"])
    return budget.budget_chart(over_steps, settings, number(bound) if bound else None, visitor.rules())


def _two_sided(settings: Any) -> bool:
    return bool((settings.get("gate") or {}).get("two_sided"))


def _rule(run_id: str, x: str) -> None:
    _grid_or_empty(curves.rule_charts(visitor.live_series(run_id, x, RULE).points, x), run_id)


def _policy(run_id: str, x: str) -> None:
    _grid_or_empty(curves.policy_charts(visitor.live_series(run_id, x, POLICY).points, x), run_id)


def _system(run_id: str, x: str) -> None:
    times = visitor.live_series(run_id, "step", timing.TIMING_NAMES, joined=True)
    series = visitor.live_series(run_id, x, SYSTEM).points
    steps = visitor.client().timeline(run_id)
    if steps:
        chart(timeline.timeline_chart(steps), run_id)
    grid([timing.step_time_chart(times.points, times.totals), timing.totals_chart(times.totals)], run_id)
    _grid_or_empty([*timeline.overlap_charts(series, x), *curves.system_charts(series, x)], run_id)


def _metrics(run_id: str, x: str) -> None:
    explorer.show({run_id: visitor.client().run(run_id)}, x)


def _evaluations(run_id: str, x: str) -> None:
    evaluations = visitor.client().evaluations(run_id)
    at = evaluated_at(run_id, x)
    charts = [accuracy_chart(evaluations, metric, x, at) for metric in metrics_of(evaluations)]
    _grid(charts or [accuracy_chart([])], visitor.client().run(run_id))


def _grid_or_empty(charts: list[Chart], run_id: str) -> None:
    if charts:
        _grid(charts, visitor.client().run(run_id))
    else:
        empty("No data yet", "Either the run has no step yet, or its rule does not report these metrics.")


EVALUATED = "eval/average/pass@1"
CHARTED = ("Overview", "Gate", "Look-ahead", "Policy", "System", "Metrics", "Evaluations")
PARTS: dict[str, tuple[Callable[[str, str], None], float | None]] = {
    "Overview": (_overview, visitor.LIVE_S),
    "Gate": (_gate, visitor.LIVE_S),
    "Look-ahead": (_rule, visitor.LIVE_S),
    "Policy": (_policy, visitor.LIVE_S),
    "System": (_system, visitor.LIVE_S),
    "Metrics": (_metrics, visitor.LIVE_S),
    "Evaluations": (_evaluations, visitor.SLOW_S),
    "Samples": (records.samples, visitor.SLOW_S),
    "Events": (records.events, visitor.SLOW_S),
    "Log": (records.log, visitor.LIVE_S),
    "Config": (records.config, None),
    "Checkpoints": (records.checkpoints, visitor.SLOW_S),
}
"""Name of each part, its function, and its refresh interval while the run executes."""
