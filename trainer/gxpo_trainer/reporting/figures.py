"""A comparison as a PNG and as a page of Markdown.

Each update rule has one hue, as in the dashboard. Lines of one rule differ in shade, and all lines in marker and dash,
so that grayscale prints are legible.
"""

from __future__ import annotations

import html
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gxpo_client.formats import percent
from gxpo_trainer.compare.curves import Axis
from gxpo_trainer.compare.evidence import weigh
from gxpo_trainer.compare.groups import Comparison, compare_groups, default_baseline
from gxpo_trainer.compare.seeds import SeedGroup
from gxpo_trainer.compare.text_tables import all_tables, markdown
from gxpo_trainer.config.rules import RULES

HUES = ("#3f7fbf", "#b8621b", "#2b8a6e", "#8a63c9", "#b0478a", "#7a7f1c", "#a3593f", "#5f7a8c")
"""By order of the rules, then for those that are unknown. A test holds that the dashboard has the same."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)))
_TONES = (0.0, 0.35, -0.35, 0.55, -0.6)
"""Of the first, second, … line of a rule: the share of white, or below 0 of black, mixed into its hue."""


Style = dict[str, Any]
"""Colour, marker and dash of a line, as `Axes.plot` takes them."""


def line_styles(rules: Sequence[str]) -> list[Style]:
    """The style of each line, given the label of its rule, such as `GXPO K=5`."""
    lines_of: Counter[int] = Counter()
    styles = []
    for number, label in enumerate(rules):
        places = (place for place, rule in enumerate(RULES) if f"{label} ".startswith(f"{rule.label} "))
        place = next(places, len(RULES))
        tone = _TONES[lines_of[place] % len(_TONES)]
        red, green, blue = (c + abs(tone) * ((tone > 0) - c) for c in to_rgb(HUES[place % len(HUES)]))
        marker, dash = MARKERS[number % len(MARKERS)], DASHES[number % len(DASHES)]
        styles.append({"color": to_hex((red, green, blue)), "marker": marker, "linestyle": dash})
        lines_of[place] += 1
    return styles


_PANELS: tuple[tuple[Axis, str, float], ...] = (
    ("backward_passes", "Backward passes", 1.0),
    ("steps", "Training steps (batches sampled)", 1.0),
    ("tokens", "Sampled tokens (millions)", 1e-6),
    ("hours", "Training time (minutes)", 60.0),
)
_LEGEND_LINE, _LEGEND_CHARACTER = 110, 19
"""Pixels next to a label (line sample and padding), and of its widest character."""
_LEGEND_LABEL = 56
PNG_NAME, PAGE_NAME = "curves.png", "report.md"


def write_report(
    out_dir: Path,
    groups: Sequence[SeedGroup],
    *,
    baseline: str | None = None,
    sampling_share: float | None = None,
    title: str = "Comparison of runs",
) -> Comparison:
    """Write curves.png and report.md into out_dir and return the comparison that they show.

    baseline: a group's name; by default the most accurate GRPO group, else the first group. Text from runs is escaped.
    """
    chosen = baseline or default_baseline(groups)
    comparison = compare_groups(groups, chosen)
    styles = line_styles([group.runs[0].rule for group in groups])
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / PNG_NAME).write_bytes(png(compose(groups, styles, comparison, title=title)))
    parts = [
        f"# {title}",
        "\n".join(f"- {line}" for line in weigh(comparison).sentence.splitlines()),
        f"![Accuracy against backward passes, steps, tokens and minutes]({PNG_NAME})",
        *map(markdown, all_tables(groups, comparison, sampling_share)),
    ]
    page = html.escape("\n\n".join(parts) + "\n", quote=False)
    (out_dir / PAGE_NAME).write_text(page, encoding="utf-8")
    return comparison


def png(figure: Figure) -> bytes:
    """The picture; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def compose(
    groups: Sequence[SeedGroup], styles: Sequence[Style], comparison: Comparison | None = None, *, title: str = ""
) -> Figure:
    """Accuracy against passes, steps, tokens and minutes with 95% bands, 1500 × 1125. comparison: for its target.

    Bands are intervals over problems for a single seed, t-intervals over seeds for several.
    """
    figure = Figure(figsize=(12, 9), dpi=125, layout="constrained")
    curves = [group.mean for group in groups]
    values = 100 * np.concatenate([curve.accuracy for curve in curves])
    pad = max(5.0, 0.25 * float(values.max() - values.min()))
    # Around the curves: the t-interval of two seeds can be wider than the axis.
    limits = (max(0.0, float(values.min()) - pad), min(100.0, float(values.max()) + pad))
    shade = 0.13 if len(groups) <= 4 else 0.06
    dotted: dict[str, Any] = {"color": "#555555", "linewidth": 1, "linestyle": (0, (1, 2))}
    for axes, (axis, label, unit) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for style, curve in zip(styles, curves, strict=True):
            x, every = curve.cost(axis) * unit, max(1, curve.steps.size // 40)
            axes.plot(x, 100 * curve.accuracy, **style, linewidth=1.8, markersize=6, markevery=every)
            if np.isfinite(curve.ci_low).any():
                band = 100 * curve.ci_low, 100 * curve.ci_high
                axes.fill_between(x, *band, color=style["color"], alpha=shade, linewidth=0)
        if comparison is not None:
            axes.axhline(100 * comparison.target.accuracy, **dotted)
        axes.set(xlabel=label, ylabel="Accuracy (%)", ylim=limits)
        axes.grid(alpha=0.25)
        axes.margins(x=0.03)
    handles = []
    for style, group in zip(styles, groups, strict=True):
        seeds = f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else ""
        label = _literal(_short(group.name) + seeds)
        handles.append(Line2D([], [], **style, linewidth=1.8, label=label))
    if comparison is not None:
        best = f"best of {_short(comparison.baseline)} ({percent(comparison.target.accuracy)})"
        handles.append(Line2D([], [], **dotted, label=_literal(best)))
    widest = _LEGEND_LINE + _LEGEND_CHARACTER * max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(4, len(handles), int(figure.bbox.width // widest)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=11)
    note = "means over seeds; bands: 95% over seeds"
    if any(len(group.runs) == 1 for group in groups):
        note = "bands: 95% over seeds, over problems for single seeds"
    figure.suptitle(f"{_literal(title)}\n{note}".strip(), fontsize=13)
    return figure


def _short(name: str) -> str:
    """A long name with its middle elided, because groups differ at the ends of their names."""
    half = _LEGEND_LABEL // 2
    return name if len(name) <= _LEGEND_LABEL else f"{name[:half]}…{name[1 - half :]}"


def _literal(text: str) -> str:
    """Escape text for matplotlib: $ starts math mode, and labels with a leading _ are hidden."""
    return ("\u200b" if text.startswith("_") else "") + text.replace("$", r"\$")
