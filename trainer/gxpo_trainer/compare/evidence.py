"""The result of a comparison in words, and its figures as text: percentages, differences, durations, ratios. Pure.

The headline is about the best candidate's accuracy at the largest common budget of backward passes. Its difference is
shown if MIN_SEEDS shared seeds or more, in equal conditions, pass the paired t-test, corrected by Holm over the
candidates: the best of several is selected for its noise.

A candidate is supported on an axis only if it shares at least MIN_SEEDS seeds with the baseline, each of them reached
the baseline's peak, its speed-up over seeds is above 1 in a t-test of the logarithms, corrected by Holm over all
candidates and costs, and the runs had the same data and settings (for time also the same hardware). Otherwise the
missing evidence is listed. A speed-up is never told without what became of the plateau: faster and worse is no gain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gxpo_client.formats import NONE, duration, number_of, percent, signed
from gxpo_trainer.compare.curves import SAME, Axis
from gxpo_trainer.compare.groups import Comparison, GroupResult
from gxpo_trainer.compare.intervals import ALPHA, Interval, holm, p_of_mean

MIN_SEEDS = 3
COSTS: tuple[Axis, ...] = ("steps", "backward_passes", "hours")
NAMES: dict[Axis, str] = {
    "steps": "steps",
    "backward_passes": "backward passes",
    "hours": "time",
    "tokens": "tokens",
    "token_passes": "token-passes",
}


def points(difference: float) -> str:
    """A difference of shares in percentage points: 0.021 → `+2.1`, −0.021 → `−2.1` with a true minus."""
    return signed(100 * difference, 1)


def bounds(interval: Interval | None) -> str:
    """The bounds of a difference in points, `−0.4 to +4.6`; empty without them."""
    if interval is None or interval.low is None or interval.high is None:
        return ""
    return f"{points(interval.low)} to {points(interval.high)}"


def against(difference: float, other: str) -> str:
    """A difference of accuracies in words: `1.4 points below GRPO`, `within 0.1 points of GRPO`."""
    size = f"{100 * abs(difference):.1f}"
    if size == "0.0":
        return f"within 0.1 points of {other}"
    return f"{size} point{'s' if size != '1.0' else ''} {'above' if difference > 0 else 'below'} {other}"


def amount(axis: Axis, cost: float) -> str:
    """A cost as `1,200` or, of an axis in hours, as a duration."""
    if cost != cost:
        return NONE
    return duration(3600 * cost) if axis == "hours" else f"{cost:,.0f}"


def ratio(speed_up: float, axis: Axis) -> str:
    """Cost of the baseline / cost of the candidate as what it is: 2 → `2.0× fewer`, 0.5 → `2.0× more`."""
    larger = max(speed_up, 1 / speed_up)
    if f"{larger:.1f}" == "1.0":
        return "equal"
    smaller = "less" if axis == "hours" else "fewer"
    return f"{larger:.1f}× {smaller if speed_up > 1 else 'more'}"


def ratio_interval(interval: Interval, axis: Axis) -> str:
    """`2.2× fewer (1.6× fewer to 3.0× fewer)`; without bounds where there are none, or all is equal."""
    mean = ratio(interval.mean, axis)
    if interval.low is None or interval.high is None:
        return mean
    low, high = ratio(interval.low, axis), ratio(interval.high, axis)
    return mean if mean == low == high else f"{mean} ({low} to {high})"


@dataclass(frozen=True, slots=True)
class Evidence:
    """The result in words and the parts of it that are computed.

    sentence: one statement per line, the headline first. conclusive: whether the difference that it states is shown, in
    equal conditions. supported: candidate → axes on which it beats the baseline by the criteria above. missing: further
    evidence.
    """

    sentence: str
    conclusive: bool
    supported: dict[str, tuple[Axis, ...]]
    missing: tuple[str, ...]


def weigh(comparison: Comparison) -> Evidence:
    """The evidence of a comparison: sentence, supported axes and missing evidence."""
    candidates = [group for group in comparison.groups if group.name != comparison.baseline]
    if not candidates:
        text = f"{comparison.baseline} is the only configuration; add another run to compare it with."
        return Evidence(text, False, {}, ("a second run",))
    supported = _supported(comparison, candidates)
    missing = _missing(comparison, candidates)
    headline, conclusive = _headline(comparison, candidates)
    parts = [headline]
    if not any(seed.peak.steps for seed in comparison.group(comparison.baseline).by_seed):
        best = percent(comparison.target.accuracy)
        parts.append(f"{comparison.baseline} never exceeds its initial policy ({best}).")
    parts += [text for group in candidates if (text := _over_seeds(comparison, group, supported[group.name]))]
    parts.append(comparison.schedule)
    if missing:
        parts.append("Missing: " + "; ".join(missing) + ".")
    return Evidence("\n".join(part for part in parts if part), conclusive, supported, tuple(missing))


def _supported(comparison: Comparison, candidates: list[GroupResult]) -> dict[str, tuple[Axis, ...]]:
    """The costs at which each candidate beats the baseline."""
    keys = [(group, axis) for group in candidates for axis in COSTS if group.num_paired >= MIN_SEEDS]
    p_values = holm([_p_value(*key) for key in keys])
    adjusted = {(group.name, axis): p_value for (group, axis), p_value in zip(keys, p_values, strict=True)}

    def supports(group: GroupResult, axis: Axis) -> bool:
        p_value, interval = adjusted.get((group.name, axis)), group.seed_speed_ups[axis]
        comparable = not any(axis == "hours" or not difference.hardware for difference in comparison.differences)
        return comparable and p_value is not None and p_value < ALPHA and interval is not None and interval.mean > 1

    return {group.name: tuple(axis for axis in COSTS if supports(group, axis)) for group in candidates}


def _p_value(group: GroupResult, axis: Axis) -> float | None:
    """Of the logarithms of the speed-ups; None unless every shared seed has one, and where all are equal."""
    ratios = [ratio for seed in group.by_seed if (ratio := seed.speed_ups[axis]) is not None]
    return p_of_mean([math.log(ratio) for ratio in ratios]) if len(ratios) == group.num_paired else None


def _headline(comparison: Comparison, candidates: list[GroupResult]) -> tuple[str, bool]:
    """The best candidate against the baseline at equal backward passes, and whether its difference is shown."""
    compared = [
        (group, result, result.over_seeds)
        for group in comparison.ranking
        if group in candidates and (result := group.at_equal_passes) and result.over_seeds
    ]
    num = compared[0][0].num_paired if compared else max(group.num_paired for group in candidates)
    if not num:
        return "Inconclusive: no run shares a seed with the baseline.", False
    unequal = [difference.setting for difference in comparison.differences if not difference.hardware]
    rest = f" Conditions differ: {_some(unequal)}." if unequal else ""
    if num < MIN_SEEDS:
        shared = "one shared seed" if num == 1 else f"{num} shared seeds"
        rest = f" Inconclusive: only {shared}. Run at least {MIN_SEEDS}.{rest}"
    if not compared:
        fix = "set evaluation.every_backward_passes alike"
        return f"Not all runs were evaluated at equal backward passes after their first step; {fix}.{rest}", False
    group, result, seeds = compared[0]
    name = group.name + (f", the best of {len(candidates)} candidates," if len(candidates) > 1 else "")
    passes = f"{amount('backward_passes', result.budget)} backward passes"
    uneven = result.evaluated_from < result.budget - SAME
    if uneven:  # between two evaluations the later one favours a run
        passes += f", evaluated from {amount('backward_passes', result.evaluated_from)} on"
        rest = f" Inconclusive: not all were evaluated there; set evaluation.every_backward_passes alike.{rest}"
    text = f"{name} is {against(seeds.mean, comparison.baseline)} after {passes}"
    if num < MIN_SEEDS:
        kind, interval = ("problems", result.over_problems) if num == 1 else ("seeds", seeds)
        return f"{text}{f' ({bounds(interval)} over {kind})' if bounds(interval) else ''}.{rest}", False
    excludes = "excludes" if seeds.excludes(0.0) else "does not exclude"
    text += f"; with {num} shared seeds the {100 * comparison.level:g}% interval {bounds(seeds)} {excludes} zero"
    uncompared = [None] * (len(candidates) - len(compared))
    adjusted = holm([*(other.p_value for _, other, _ in compared), *uncompared])[0]
    shown = adjusted is not None and adjusted < ALPHA
    if seeds.excludes(0.0) and not shown:
        but = "all seeds differ alike" if adjusted is None else f"not once corrected for {len(candidates)} comparisons"
        text += f", but {but}"
    return f"{text}.{rest}", shown and not unequal and not uneven


def _some(names: list[str]) -> str:
    """The first six names."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _plateau(group: GroupResult) -> str:
    """What became of the plateau, in points: `its plateau differs by −2.0 points (−3.0 to −1.0): lower`."""
    if group.plateau is None:
        return "with an unknown plateau"
    difference = group.plateau.difference
    within = f" ({bounds(difference)})" if bounds(difference) else ""
    return f"its plateau differs by {points(difference.mean)} points{within}: {group.plateau.verdict}"


def _over_seeds(comparison: Comparison, group: GroupResult, supported: tuple[Axis, ...]) -> str:
    """The evidence over seeds; empty with one seed or none. Ratios are those of all seeds: of the ones that got there
    alone they are too good."""
    if group.num_paired <= 1:
        return ""
    level = f"{100 * comparison.level:g}%"
    ratios = ", ".join(
        f"{NAMES[axis]} {ratio_interval(interval, axis)}"
        for axis in COSTS
        if (interval := group.seed_speed_ups[axis]) and interval.num == group.num_paired
    )
    seen = f"{group.name}: {group.num_reached} of {group.num_paired} seeds reached the baseline's peak"
    held = " and ".join(NAMES[axis] for axis in supported)
    claim = f"supported: less {held}" if held else "no advantage is supported"
    claim += f"; {_plateau(group)}"
    return f"{seen}{f'; {level} intervals over seeds: {ratios}' if ratios else ''}; {claim}."


def _missing(comparison: Comparison, candidates: list[GroupResult]) -> list[str]:
    missing = []
    fewest = min(group.num_paired for group in candidates)
    if fewest < MIN_SEEDS:
        missing.append(f"seeds shared with the baseline ({fewest} of at least {MIN_SEEDS})")
    for group in candidates:
        if group.num_paired >= MIN_SEEDS and group.num_reached < group.num_paired:
            seeds = number_of(group.num_paired - group.num_reached, "seed")
            missing.append(f"longer runs of {group.name} ({seeds} did not reach the target)")
    for group in comparison.groups:
        if lost := [str(seed.seed) for seed in group.by_seed if not seed.final.steps]:
            missing.append(f"evaluations after the start of {group.name} (none with seed {_some(lost)})")
        if group.unshared:
            missing.append(f"evaluations after equal steps or passes in all seeds of {group.name}")
    for hardware, what in ((False, "equal conditions"), (True, "equal hardware for the times")):
        if names := [difference.setting for difference in comparison.differences if difference.hardware == hardware]:
            missing.append(f"{what} (these differ: {_some(names)})")
    return missing
