"""Pictures of a study's report as PNG: accuracy against costs, the ladder, and when a look-ahead pays.

`styles`: of the arms' lines, by arm.
"""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from gxpo_trainer.compare.curves import Axis, mean_curve
from gxpo_trainer.compare.seeds import SeedGroup, seed_band
from gxpo_trainer.reporting.figures import LineStyle
from gxpo_trainer.studies.findings import Findings

_PANELS: tuple[tuple[Axis, str, float], ...] = (
    ("backward_passes", "Backward passes", 1.0),
    ("steps", "Training steps (batches sampled)", 1.0),
    ("tokens", "Sampled tokens (millions)", 1e-6),
    ("hours", "Training time (minutes)", 60.0),
)
_SHARES = np.linspace(0.0, 0.95, 96)


def draw_curves(groups: Mapping[str, SeedGroup], styles: Mapping[str, LineStyle]) -> bytes:
    """Mean accuracy over seeds against four costs, with 95% bands over seeds."""
    figure = _figure((12, 9))
    for axes, (axis, label, unit) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for arm, group in groups.items():
            curve = mean_curve([run.curve for run in group.runs])
            x = curve.cost(axis) * unit
            low, high = seed_band(group, curve)
            axes.plot(x, 100 * curve.accuracy, label=group.name, markersize=4, **styles[arm].options)
            axes.fill_between(x, 100 * low, 100 * high, color=styles[arm].color, alpha=0.08, linewidth=0)
        axes.set(xlabel=label, ylabel="Held-out accuracy (%)")
        axes.grid(alpha=0.25)
    return _png(figure)


def draw_ladder(findings: Findings, styles: Mapping[str, LineStyle]) -> bytes:
    """Accuracy at the tuning budget against the learning rate, a line an arm; a cross where a run diverged."""
    figure = _figure((8, 5.5))
    axes = figure.subplots()
    for arm in findings.arms:
        if arm.ladder:
            rates, accuracies, diverged = zip(*arm.ladder, strict=True)
            axes.plot(rates, [100 * value for value in accuracies], label=arm.label, **styles[arm.arm].options)
            for rate, value, lost in zip(rates, accuracies, diverged, strict=True):
                if lost:
                    axes.plot([rate], [100 * value], marker="x", markersize=12, color="#000000")
    axes.set(xscale="log", xlabel="Learning rate", ylabel="Accuracy at the tuning budget (%)")
    axes.grid(alpha=0.25)
    return _png(figure)


def draw_payoff(findings: Findings, styles: Mapping[str, LineStyle]) -> bytes:
    """Speed-up in time over the baseline against the share of a step that sampling takes, with bands over seeds."""
    figure = _figure((8, 5.5))
    axes = figure.subplots()
    for arm in findings.arms:
        if arm.payoff is None:
            continue
        speed_ups = [arm.payoff.speed_up(float(share)) for share in _SHARES]
        line = styles[arm.arm].options | {"marker": ""}
        axes.plot(100 * _SHARES, [interval.mean for interval in speed_ups], label=arm.label, **line)
        low, high = ([getattr(interval, bound) for interval in speed_ups] for bound in ("low", "high"))
        if None not in low:
            axes.fill_between(100 * _SHARES, low, high, color=line["color"], alpha=0.08, linewidth=0)
    axes.axhline(1.0, color="#555555", linewidth=1, linestyle=":")
    axes.axvline(100 * findings.sampling_share, color="#555555", linewidth=1, linestyle="--", label="measured here")
    axes.set(xlabel="Share of a baseline step that sampling takes (%)", ylabel="Speed-up in time", yscale="log")
    axes.set_yticks([0.3, 0.5, 0.7, 1, 1.5, 2, 3])
    axes.yaxis.set_major_formatter("{x:g}×")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25, which="both")
    return _png(figure)


def _figure(size: tuple[float, float]) -> Figure:
    figure = Figure(figsize=size, dpi=125, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Figure) -> bytes:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        columns = int(figure.get_figwidth() // 4)  # a label of the reference study takes up to 4 inches
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
