"""The tables of a study's report, and how it writes accuracies, differences and shares."""

from __future__ import annotations

from collections.abc import Callable

from gxpo_trainer.compare.intervals import Interval
from gxpo_trainer.compare.sampling_share import SHARES
from gxpo_trainer.compare.text_tables import Table
from gxpo_trainer.compare.wording import ratio, ratio_interval
from gxpo_trainer.published import gxpo_paper
from gxpo_trainer.studies.findings import EqualCost, Findings, Match

NEVER = "never"
PAPER_K = 5
"""K of the paper's row among the diagnostics."""


def equal_cost_table(findings: Findings, axis: str) -> Table:
    """Accuracy and difference to the baseline; `axis` is `passes` or `steps`."""
    header = ("arm", "at", "accuracy", "baseline", "difference", "over problems", "p", "p (Holm)", "would show")
    empty = ["–"] * (len(header) - 1)
    rows = [
        (found.label, *(empty if cost is None else _equal_cost_cells(cost)))
        for found in findings.candidates
        for cost in (getattr(found, axis) or (None,))
    ]
    title = "Accuracy in %, differences in points with 95% intervals over seeds"
    return Table(title, header, tuple(rows))


def _equal_cost_cells(cost: EqualCost) -> list[str]:
    return [
        f"{cost.cost:g}",
        percent(cost.accuracy),
        percent(cost.baseline),
        points(cost.difference),
        points(cost.over_problems) if cost.over_problems else "–",
        _p_value(cost.p_value),
        _p_value(cost.adjusted),
        "–" if cost.detectable is None else f"{100 * cost.detectable:.1f}",
    ]


def match_table(findings: Findings) -> Table:
    header = ("arm", "reach", "seeds that do", "steps", "backward passes")
    rows = [
        (
            found.label,
            goal(match),
            f"{match.reached} of {len(found.seeds)}",
            "–" if match.steps is None else ratio_interval(match.steps, "steps"),
            "–" if match.passes is None else ratio_interval(match.passes, "backward_passes"),
        )
        for found in findings.candidates
        for match in found.matches
    ]
    return Table(
        "Cost relative to the baseline's run of the same seed: geometric mean over the seeds, 95% intervals",
        header,
        tuple(rows),
    )


def payoff_table(findings: Findings) -> Table:
    shares = sorted({*SHARES, round(findings.sampling_share, 2)})
    header = ("arm", *(f"{100 * share:.0f}%" for share in shares), "asynchronous at 50%", "break-even")
    rows = []
    for found in findings.candidates:
        if found.payoff is not None:
            values = [ratio(found.payoff.speed_up(share).mean, "hours") for share in shares]
            overlapped = ratio(found.payoff.speed_up(0.5, asynchronous=True).mean, "hours")
            even = share(found.payoff.break_even) if found.payoff.passes > 1 else "–"
            rows.append((found.label, *values, overlapped, even))
    title = f"Time to the same accuracy by share of sampling ({100 * findings.sampling_share:.0f}% in this study)"
    return Table(title, header, tuple(rows))


def ladder_table(findings: Findings) -> Table:
    rates = sorted({rate for found in findings.arms for rate, _, _ in found.ladder})
    rows = []
    for found in findings.arms:
        by_rate = {rate: f"{100 * value:.1f}" + (" (diverged)" if lost else "") for rate, value, lost in found.ladder}
        rows.append((found.label, *(by_rate.get(rate, "–") for rate in rates), f"{found.learning_rate:g}"))
    header = ("arm", *(f"{rate:g}" for rate in rates), "chosen")
    return Table("Accuracy in % at the tuning budget by learning rate", header, tuple(rows))


def diagnostics_table(findings: Findings) -> Table:
    names = {
        "gxpo/theta_k_relative_error": "error of θᴷ",
        "gxpo/retention_mean": "retention",
        "gxpo/scale_mean": "scale",
        "gxpo/displacement_ratio": "displacement ratio",
        "grad/cos_g0_slow": "cos(g⁰, g_slow)",
        "gxpo/inactive_fraction": "inactive",
    }
    rows = [
        (found.label, *(_number(found.medians.get(name), ".3f") for name in names), percent(found.final))
        for found in findings.arms
        if found.medians
    ]
    paper = next(row for row in gxpo_paper().table("active_phase").rows if row["k"] == PAPER_K)
    stated = (paper.get(name.partition("/")[2]) for name in names)
    rows.append((f"paper, K={PAPER_K}", *(_number(value, ".3f") for value in stated), "–"))
    return Table("Medians", ("arm", *names.values(), "final accuracy"), tuple(rows))


def goal(match: Match) -> str:
    return "the baseline's peak" if match.accuracy is None else f"{100 * match.accuracy:g}%"


def percent(interval: Interval) -> str:
    return _with_bounds(interval, lambda value: f"{100 * value:.1f}", "%")


def points(interval: Interval) -> str:
    return _with_bounds(interval, lambda value: f"{100 * value:+.1f}", " points")


def share(interval: Interval) -> str:
    if interval.low is not None and interval.low >= 1:
        return NEVER
    return _with_bounds(interval, lambda value: f"{100 * max(0.0, value):.0f}", "%")


def _with_bounds(interval: Interval, show: Callable[[float], str], unit: str) -> str:
    bounds = "" if interval.low is None or interval.high is None else f" [{show(interval.low)}, {show(interval.high)}]"
    return f"{show(interval.mean)}{unit}{bounds}".replace("-", "−")


def _p_value(value: float | None) -> str:
    return "< 0.001" if value is not None and value < 0.001 else _number(value, ".3f")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
