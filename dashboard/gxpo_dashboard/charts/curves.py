"""Line charts of a run's metrics.

Any metrics of one or several runs below each other, with one x-axis, legend and pointer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gxpo_client.formats import percent, significant, size
from gxpo_dashboard.charts.base import (
    AXES,
    Chart,
    Spec,
    color,
    dash,
    hover_params,
    layer,
    metric_chart,
    near,
    quantity,
    thinned,
    tooltip,
    typed_frame,
    x_encoding,
    y_encoding,
    zoom_params,
)
from gxpo_dashboard.charts.base import NUMBER as FORM
from gxpo_dashboard.charts.base import axis_value as at_axis
from gxpo_dashboard.view_models.series import Points, Series

REWARD = {"reward/mean": "mean reward", "reward/zero_variance_fraction": "groups without signal"}
RETENTION = {"gxpo/retention_mean": "retention r = g¹/g⁰", "gxpo/retention_std": "spread of r"}
SCALE = {"gxpo/scale_mean": "scale S_K(r)/S₂(r)", "gxpo/displacement_ratio": "displacement ratio"}
COSINE = {"grad/cos_g0_slow": "cos(g⁰, g_slow)"}
FRACTIONS = {"gxpo/inactive_fraction": "inactive coordinates", "gxpo/ratio_clipped_fraction": "clamped ratios"}
NORMS = {"grad/norm_g0": "‖g⁰‖", "grad/norm_g1": "‖g¹‖", "grad/norm_slow": "‖g_slow‖"}
UPDATE = {"update/norm": "update norm"}
KL = {"policy/kl": "KL to the reference"}
ENTROPY = {"policy/entropy": "entropy"}
CLIP = {
    "policy/clip_fraction": "clipped tokens",
    "policy/clip_low_fraction": "at the low side",
    "policy/clip_high_fraction": "at the high side",
}
GAP = {"rollout/logprob_gap_mean": "mean", "rollout/logprob_gap_max": "maximum"}
LENGTH = {"rollout/length_mean": "mean length"}
FAILURES = {
    "rollout/truncated_fraction": "truncated",
    "verify/unparsed_fraction": "unparsed",
    "verify/timeout_fraction": "timed out",
    "verify/error_fraction": "grader errors",
}
TURNS = {"env/turns_mean": "mean turns"}
EPISODES = {
    "env/done_fraction": "ended by the environment",
    "env/timeout_fraction": "timed out",
    "env/error_fraction": "failed",
}
CPU = {"system/cpu_percent": "CPU"}
MEMORY = {
    "system/memory_bytes": "machine",
    "system/learner_peak_bytes": "learner's peak",
    "system/sampler_peak_bytes": "sampler's peak",
}
_GPUS = range(16)
GPU_LOAD = {f"system/gpu{n}/utilization_percent": f"GPU {n}" for n in _GPUS}
GPU_MEMORY = {"system/learner_device_peak_bytes": "learner's peak"} | {
    f"system/gpu{n}/memory_bytes": f"GPU {n}" for n in _GPUS
}
DISK = {"system/disk_free_bytes": "free"}
TRAFFIC = {
    "system/network_sent_bytes_per_s": "network, sent",
    "system/network_received_bytes_per_s": "network, received",
    "system/disk_written_bytes_per_s": "disk, written",
}
TRAJECTORY = {
    "gxpo/theta_k_relative_error": "θᴷ, relative",
    "gxpo/displacement_cosine_error": "1 − cosine of displacements",
}
NAMES: tuple[str, ...] = (
    *REWARD, *RETENTION, *SCALE, *COSINE, *FRACTIONS, *NORMS, *UPDATE, *KL, *ENTROPY, *CLIP, *GAP, *LENGTH,
    *FAILURES, *TURNS, *EPISODES, *CPU, *MEMORY, *GPU_LOAD, *GPU_MEMORY, *DISK, *TRAFFIC, *TRAJECTORY,
)  # fmt: skip


def reward_chart(series: Series, x: str) -> Chart:
    note = "A group with equal rewards has no gradient."
    return metric_chart("reward", "Reward", series, REWARD, x=x, y_title="reward", say=significant, note=note)


def rule_charts(series: Series, x: str) -> list[Chart]:
    """Charts of the look-ahead; metrics that the rule does not report are omitted."""
    charts = [
        metric_chart(
            "retention", "Gradient retention", series, RETENTION, x=x, y_title="r",
            note="Over active coordinates, clamped. 1: the gradient did not change in the first step.",
        ),
        metric_chart(
            "scale", "Scale and displacement", series, SCALE, x=x, y_title="factor",
            note="Length of the extrapolation relative to the two probes.",
        ),
        metric_chart("cosine", "Cosine of first and corrective gradient", series, COSINE, x=x, y_title="cosine"),
        metric_chart("norms", "Gradient norms before clipping", series, NORMS, x=x, y_title="norm"),
        metric_chart("fractions", "Inactive or clamped coordinates", series, FRACTIONS, x=x, y_title="fraction",
                     form=".1~%", say=percent),
        metric_chart("update-norm", "Update norm", series, UPDATE, x=x, y_title="‖Δθ‖", form=".1~e"),
        metric_chart("trajectory", "Error relative to a real K-step trajectory", series, TRAJECTORY, x=x,
                     y_title="error", zero=True),
    ]  # fmt: skip
    return [chart for chart in charts if not chart.empty]


def policy_charts(series: Series, x: str) -> list[Chart]:
    """Charts of responses; those of the environment only in runs that have one."""
    charts = [
        metric_chart("entropy", "Policy entropy", series, ENTROPY, x=x, y_title="nats per token"),
        metric_chart("kl", "KL to the reference", series, KL, x=x, y_title="nats per token", zero=True),
        metric_chart("clip", "Clipped tokens", series, CLIP, x=x, y_title="fraction", form=".2~%",
                     zero=True, say=percent),
        metric_chart("length", "Response length", series, LENGTH, x=x, y_title="tokens"),
        metric_chart("failures", "Responses with grading problems", series, FAILURES, x=x,
                     y_title="fraction", form=".1~%", zero=True, say=percent),
        metric_chart("turns", "Environment: turns", series, TURNS, x=x, y_title="turns per episode", zero=True),
        metric_chart("episodes", "Environment: ends of episodes", series, EPISODES, x=x, y_title="fraction",
                     form=".0%", zero=True, say=percent),
    ]  # fmt: skip
    return [chart for chart in charts if not chart.empty]


def system_charts(series: Series, x: str) -> list[Chart]:
    gap_note = "Between learner and sampler on the step's responses; small if both have the same weights."
    charts = [
        metric_chart("gap", "Log-probability gap", series, GAP, x=x, y_title="|Δ log π|", form=".0e", log=True,
                     note=gap_note),
        metric_chart("memory", "Memory", series, MEMORY, x=x, y_title="bytes", form=".2~s", zero=True, say=size),
        metric_chart("gpu-memory", "GPU memory", series, GPU_MEMORY, x=x, y_title="bytes", form=".2~s", zero=True,
                     say=size, note="Largest of the step on each GPU of the controller's machine. Learner's peak: most "
                     "that its first rank has reserved so far."),
        metric_chart("gpu", "GPUs", series, GPU_LOAD, x=x, y_title="percent", zero=True,
                     note="Mean utilization of the step, on the controller's machine."),
        metric_chart("cpu", "CPU", series, CPU, x=x, y_title="percent", zero=True),
        metric_chart("traffic", "Network and disk", series, TRAFFIC, x=x, y_title="bytes per second", form=".2~s",
                     zero=True, say=_rate, note="Of the machine that runs the controller, per second of the step."),
        metric_chart("disk", "Disk space", series, DISK, x=x, y_title="bytes", form=".2~s", zero=True, say=size,
                     note="On the disk of the run's folder."),
    ]  # fmt: skip
    return [chart for chart in charts if not chart.empty]


def _rate(value: float) -> str:
    return f"{size(value)} per second"


def rule_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rule's settings of a run's config."""
    rule: Mapping[str, Any] = (config.get("learner") or {}).get("rule") or {}
    return rule


def sparkline(values: Sequence[float], most: int = 30) -> list[float]:
    """At most `most` evenly spaced values, for a table cell."""
    if len(values) <= most:
        return list(values)
    stride = (len(values) - 1) / (most - 1)
    return [values[round(i * stride)] for i in range(most)]


_MOST_ROWS, _MOST_LINES = 8, 24
_HEIGHT = 110
_LEGEND = "shown"

Found = Mapping[str, Mapping[str, Points]]
"""Metric → run → points."""


def prefixes(names: Sequence[str]) -> list[str]:
    """`gate/z`, `gate/value`, `time/step_s` → [`gate`, `time`]: the groups of metrics, sorted."""
    return sorted({name.partition("/")[0] for name in names})


def matching(names: Sequence[str], prefix: str, text: str) -> list[str]:
    """Names of a group, all groups for an empty one, that contain every word of `text`."""
    words = text.lower().split()
    return [
        name
        for name in sorted(names)
        if (not prefix or name.partition("/")[0] == prefix) and all(word in name.lower() for word in words)
    ]


def most_rows(num_runs: int) -> int:
    """Metrics of one chart: fewer for many runs, because the browser redraws every line at every refresh."""
    return max(1, min(_MOST_ROWS, _MOST_LINES // max(1, num_runs)))


def explorer_chart(found: Found, runs: Sequence[str], x: str, smoothing: float = 0.0, log: bool = False) -> Chart:
    """One row per metric. A press on a run in the legend hides the others; the pointer marks one x in all rows.

    runs: labels, in the order of the legend. smoothing: weight of the average that `found` holds. log: logarithmic
    axes, without non-positive values.
    """
    rows = []
    for name, series in found.items():
        for label, points in series.items():
            for step, at, value in zip(points.steps, points.x, points.y, strict=True):
                rows.append((name, label, at_axis(at, x), math.nan if log and value <= 0 else value, step))
    frame = typed_frame(rows, metric="str", series="str", x="float64", y="float64", step="int64")
    metrics = list(found)
    last = metrics[-1] if metrics else ""
    lines = [_lines(number) for number in range(len(metrics))]
    nearest = {**hover_params()[0]["select"], "encodings": ["x"]}
    spec: Spec = {
        "vconcat": [_row(name, number, runs, x, log, name == last) for number, name in enumerate(metrics)],
        # One layer of each row: a parameter of two layers of a row is defined twice.
        "params": [
            {**zoom_params()[0], "views": lines},
            {"name": "hover", "select": nearest, "views": [_points(number) for number in range(len(metrics))]},
            {"name": _LEGEND, "select": {"type": "point", "fields": ["series"]}, "bind": "legend", "views": lines},
        ],
        "resolve": {"scale": {"x": "shared"}},
        "spacing": 14,
        # Vega's default, SVG, takes 50 ms longer to redraw twenty lines.
        "usermeta": {"embedOptions": {"renderer": "canvas"}},
        "padding": {"left": 0, "right": 0, "top": 4, "bottom": 4},
    }
    return Chart(
        "explorer",
        "Metrics",
        spec,
        {"points": frame, "near": near(frame, 600)},
        f"{', '.join(metrics)} over {AXES[x]}",
        _words(found),
        _note(smoothing),
        height=70 + (_HEIGHT + 34) * len(metrics),
        labels={"x": AXES[x], "y": "value", "series": "run"},
        thinned=thinned(*(points for series in found.values() for points in series.values())),
    )


def _row(name: str, number: int, runs: Sequence[str], x: str, log: bool, last: bool) -> Spec:
    """A metric's lines, the points under the pointer, and a rule at its x."""
    place_x = x_encoding(x)
    place_x["axis"] = {**place_x["axis"], "labelFlush": True}
    if not last:
        place_x = {**place_x, "title": None, "axis": {**place_x["axis"], "labels": False}}
    y = {**y_encoding(name, FORM, log=log)}
    y["axis"] = {
        **y["axis"],
        "titleAngle": 0,
        "titleAlign": "left",
        "titleAnchor": "end",
        "titleY": -14,
        "titleX": 0,
        "tickCount": 3,
    }
    # Streamlit gives each row the width of the page without its axis: labels are above their grid lines.
    y["axis"] |= {"labelAlign": "left", "labelBaseline": "line-bottom", "labelPadding": -4, "ticks": False}
    chosen: Spec = {"condition": {"param": _LEGEND, "value": 1}, "value": 0.08}
    place = {"x": place_x, "y": y, "color": color(runs)}
    hovered = {"param": "hover", "empty": False}
    only = {"transform": [{"filter": {"field": "metric", "equal": name}}]}
    lines = layer("points", "line", {**place, "strokeDash": dash(runs), "opacity": chosen}, aria=False, strokeWidth=2)
    dots = {**place, "opacity": {"condition": {**hovered, "value": 1}, "value": 0}, "tooltip": tooltip(x, FORM)}
    points = layer("near", "point", dots, aria=False, filled=True, size=50)
    rule = layer("near", "rule", {"x": quantity("x")}, aria=False, strokeWidth=1, color="#7b8794")
    rule["transform"] = [{"filter": {"field": "metric", "equal": name}}, {"filter": hovered}]
    return {
        "height": _HEIGHT,
        "layer": [{**lines, **only, "name": _lines(number)}, {**points, **only, "name": _points(number)}, rule],
    }


def _lines(number: int) -> str:
    return f"lines{number}"


def _points(number: int) -> str:
    return f"points{number}"


def _note(smoothing: float) -> str:
    average = f" Exponential average over all steps, weight {smoothing:g}; gates are never smoothed."
    return "Select a run in the legend to show it alone." + (average if smoothing else "")


def _words(found: Found) -> str:
    if not found:
        return "No data yet."
    num = len({label for series in found.values() for label in series})
    return f"{len(found)} metrics of {num} run{'s' if num != 1 else ''}: {', '.join(found)}."
