"""The report of a study as Markdown and HTML with tables and pictures. Every number comes from the study's data.

The pictures are PNG: accuracy against costs, the ladder, and when a look-ahead pays. `styles`: of the arms' lines, by
arm.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from gxpo_trainer.compare.curves import Axis, mean_curve
from gxpo_trainer.compare.evidence import ratio, ratio_bounds, ratio_interval, ratio_words
from gxpo_trainer.compare.groups import SHARES
from gxpo_trainer.compare.intervals import Interval
from gxpo_trainer.compare.published import gxpo_paper
from gxpo_trainer.compare.seeds import SeedGroup, seed_band
from gxpo_trainer.compare.text_tables import Table
from gxpo_trainer.reporting.figures import LineStyle, html_page, html_table, line_styles
from gxpo_trainer.studies.data import StudyData, key_of
from gxpo_trainer.studies.definition import run_config
from gxpo_trainer.studies.findings import COLLAPSED, ArmFindings, EqualCost, Findings, Match, find

NEVER = "never"
PAPER_K = 5
"""K of the paper's row among the diagnostics."""


def equal_cost_table(findings: Findings, axis: str) -> Table:
    """Accuracy and difference to the baseline; `axis` is `passes` or `steps`."""
    header = ("arm", "at", "accuracy", "baseline", "difference", "over problems", "p", "p (Holm)", "would show")
    empty = ["–"] * (len(header) - 1)
    rows = [
        (arm.label, *(empty if cost is None else _equal_cost_cells(cost)))
        for arm in findings.candidates
        for cost in (getattr(arm, axis) or (None,))
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
            arm.label,
            goal(match),
            f"{match.reached} of {len(arm.seeds)}",
            "–" if match.steps is None else ratio_interval(match.steps, "steps"),
            "–" if match.passes is None else ratio_interval(match.passes, "backward_passes"),
        )
        for arm in findings.candidates
        for match in arm.matches
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
    for arm in findings.candidates:
        if (payoff := arm.payoff) is not None:
            values = [ratio(payoff.speed_up(share).mean, "hours") for share in shares]
            overlapped = ratio(payoff.speed_up(0.5, asynchronous=True).mean, "hours")
            even = share(payoff.break_even) if payoff.passes > 1 else "–"
            rows.append((arm.label, *values, overlapped, even))
    title = f"Time to the same accuracy by share of sampling ({100 * findings.sampling_share:.0f}% in this study)"
    return Table(title, header, tuple(rows))


def ladder_table(findings: Findings) -> Table:
    rates = sorted({rate for arm in findings.arms for rate, _, _ in arm.ladder})
    rows = []
    for arm in findings.arms:
        by_rate = {rate: f"{100 * value:.1f}" + (" (diverged)" if lost else "") for rate, value, lost in arm.ladder}
        rows.append((arm.label, *(by_rate.get(rate, "–") for rate in rates), f"{arm.learning_rate:g}"))
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
        (arm.label, *(_number(arm.medians.get(name)) for name in names), percent(arm.final))
        for arm in findings.arms
        if arm.medians
    ]
    paper = next(row for row in gxpo_paper().table("active_phase").rows if row["k"] == PAPER_K)
    stated = (paper.get(name.partition("/")[2]) for name in names)
    rows.append((f"paper, K={PAPER_K}", *map(_number, stated), "–"))
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
    return "< 0.001" if value is not None and value < 0.001 else _number(value)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


IMAGES = "images"
"""Folder of the pictures, next to the report."""
_NOT_SHOWN = "no difference shown after Holm's correction"


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of the report: its file name, and its content in words."""

    file: str
    alt: str


Block = str | list[str] | Table | Picture
"""A heading (`# …`), a paragraph, a list, a table or a picture."""


def write_report(data: StudyData, *files: Path) -> None:
    """Write each of `files`, HTML or else Markdown by its ending, and the pictures into `images/` next to it."""
    pictures = render_pictures(data)
    blocks = compose(data)
    for file in files:
        folder = file.parent / IMAGES
        folder.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            (folder / name).write_bytes(picture)
        is_html = file.suffix == ".html"
        text = html_page(data.study.title, list(map(_html_block, blocks))) if is_html else as_markdown(blocks)
        file.write_text(text, encoding="utf-8")


def render_pictures(data: StudyData) -> dict[str, bytes]:
    """PNG by file name; none before the baseline is complete."""
    findings = find(data)
    if findings is None:
        return {}
    arms = [arm.arm for arm in findings.arms]
    groups = {arm: group for arm in arms if (group := data.group(arm)) is not None}
    styles = dict(zip(arms, line_styles(list(rule_labels(data, arms).values())), strict=True))
    name = data.study.name
    return {
        f"{name}-curves.png": draw_curves(groups, styles),
        f"{name}-ladder.png": draw_ladder(findings, styles),
        f"{name}-payoff.png": draw_payoff(findings, styles),
    }


def rule_labels(data: StudyData, arms: Sequence[str]) -> dict[str, str]:
    """Arm → label of the rule that it trains with; the arm's own label may be any text."""
    return {arm: run_config(data.study, key_of(data.reported(arm)[0])).learner.rule.label for arm in arms}


def compose(data: StudyData) -> list[Block]:
    """The report's content."""
    study, findings = data.study, find(data)
    if findings is None:
        done = len(data.curves)
        return [f"# {study.title}", f"Incomplete: {done} runs are done, and the baseline lacks seeds. No result yet."]
    name = study.name
    return [
        f"# {study.title}",
        "For readers who choose an update rule. Intervals are 95% over seeds; a difference counts as shown only after "
        "Holm's correction for all comparisons. The tables below have every figure of this summary.",
        conclusion(data, findings),
        Picture(f"{name}-curves.png", "Held-out accuracy against backward passes, steps, tokens and time, by arm"),
        "## At equal backward passes",
        equal_cost_table(findings, "passes"),
        "## At equal steps",
        "Equal steps are equal numbers of sampled batches: what counts where sampling dominates the cost.",
        equal_cost_table(findings, "steps"),
        "## Steps and passes to reach an accuracy",
        match_table(findings),
        "## When it pays",
        "A step of the baseline is a share of sampling and a rest of updating. An arm samples as much a step, updates "
        "more often, and may need fewer steps to the same accuracy. The table shows its time to that accuracy "
        "against the baseline's; asynchronous means that sampling runs during the update.",
        payoff_table(findings),
        Picture(f"{name}-payoff.png", "Speed-up in time against the share of sampling, by arm"),
        *_weights_along_the_way(findings),
        "## Learning rates",
        f"Each arm was tuned on seeds apart from the reported ones ({', '.join(map(str, study.ladder.seeds))}), for "
        f"{study.ladder.backward_passes} backward passes a run, upwards until its accuracy fell by more than "
        f"{100 * study.ladder.drop:g} points.",
        ladder_table(findings),
        Picture(f"{name}-ladder.png", "Accuracy at the tuning budget against the learning rate, by arm"),
        "## Predictions and diagnostics",
        f"Medians over steps and seeds, and those of the GXPO paper for K = {PAPER_K} (Qwen2.5-1.5B). The error is "
        "that of the predicted θᴷ against a true K-step trajectory.",
        diagnostics_table(findings),
        "## Method",
        _method(data, findings),
        "## Still open",
        _open_questions(data, findings),
    ]


def conclusion(data: StudyData, findings: Findings) -> list[str]:
    """The result in a sentence for each question: at equal passes, at equal steps, and when it pays."""
    base = findings.baseline
    lines = [
        f"After {data.study.backward_passes} backward passes {base.label}, at its best learning rate "
        f"({base.learning_rate:g}), reaches {percent(base.final)}: mean and 95% interval over {len(base.seeds)} "
        "seeds. Every other arm is compared with it at its own best rate."
    ]
    for spent in sorted({cost.cost for arm in findings.candidates for cost in arm.passes}):
        pairs = [(arm.label, cost) for arm in findings.candidates for cost in arm.passes if cost.cost == spent]
        lines.append(f"At {spent:g} backward passes: {_by_claim(pairs)}.")
    steps = [(f"{arm.label} at {cost.cost:g}", cost) for arm in findings.candidates for cost in arm.steps]
    if steps:
        lines.append(f"At equal steps: {_by_claim(steps)}.")
    lines += [f"{arm.label} {_pays(arm)}." for arm in findings.candidates]
    if findings.missing:
        lines.append(f"Not complete yet, and so not compared: {', '.join(findings.missing)}.")
    return lines


def _by_claim(pairs: Sequence[tuple[str, EqualCost]]) -> str:
    """Labels with their differences, by what the corrected test carries and never more."""
    claims: dict[str, list[str]] = {"higher": [], "lower": [], _NOT_SHOWN: []}
    for label, cost in pairs:
        significant = cost.adjusted is not None and cost.adjusted < 0.05
        claim = ("higher" if cost.difference.mean > 0 else "lower") if significant else _NOT_SHOWN
        claims[claim].append(f"{label} {points(cost.difference)}")
    return "; ".join(f"{claim}: {', '.join(arms)}" for claim, arms in claims.items() if arms)


def _pays(arm: ArmFindings) -> str:
    match = arm.matches[-1]
    if arm.payoff is None:
        return f"has no speed-up stated: {match.reached} of {len(arm.seeds)} seeds reached {goal(match)}"
    even = arm.payoff.break_even if arm.payoff.passes > 1 else None
    ratio = arm.payoff.steps
    steps = f"needs {ratio_words(ratio.mean, 'steps')} to {goal(match)}{ratio_bounds(ratio, 'steps')}"
    if even is None:
        return steps
    if even.low is not None and even.high is not None and even.high < 1:
        least = f"{100 * max(0.0, even.high):.0f}%"
        return f"{steps} and saves time where sampling takes {least} of a step or more (break-even {share(even)})"
    if share(even) == NEVER:
        return f"{steps} and saves time at no share of sampling"
    return f"{steps}; no share of sampling is shown at which it saves time (break-even {share(even)})"


def _weights_along_the_way(findings: Findings) -> list[Block]:
    """The look-ahead that costs no pass; nothing for a study without it."""
    moved = findings.extrapolated
    if moved is None:
        return []
    row = (moved.label, percent(moved.before), percent(moved.extrapolated), percent(moved.after))
    differences = (points(moved.gained), points(moved.missed))
    header = ("arm", f"step {moved.step}", f"extrapolated to {moved.target:g}", f"step {moved.target:g}")
    return [
        "## Weights extrapolated along training",
        f"The change of the weights up to step {moved.step}, times {moved.target / moved.step:g}: a look-ahead that "
        "costs no pass.",
        Table(
            "Accuracy in %, and differences of the extrapolated weights in points, with 95% intervals over seeds",
            (*header, f"to step {moved.step}", f"to step {moved.target:g}"),
            ((*row, *differences),),
        ),
    ]


def _method(data: StudyData, findings: Findings) -> list[str]:
    study = data.study
    versions = data.conditions.get("packages") or {}
    engines = ", ".join(f"{name} {versions[name]}" for name in ("torch", "vllm", "deepspeed") if name in versions)
    num_tuned = sum(key.stage == "ladder" for key in data.curves)
    ends = [
        f"{arm.label} collapsed in {arm.collapsed} and diverged in {arm.diverged} of {len(arm.seeds)} runs"
        for arm in findings.arms
        if arm.collapsed or arm.diverged
    ]
    lines = [
        f"Preset `{study.preset}`, seeds {', '.join(map(str, study.seeds))}, "
        f"{study.backward_passes} backward passes a run, "
        f"evaluated every {study.evaluate_every} passes.",
        *study.remarks,
        "Differences are paired by seed: t-intervals over seeds, bootstrap over problems, geometric means of ratios, "
        "Holm's correction over all comparisons of a table.",
        "`would show`: the smallest true difference that this number of seeds shows with 80% probability.",
        f"Outcomes: {'; '.join(ends) or 'no reported run diverged or collapsed'} (a run collapses when it ends below "
        f"{100 * COLLAPSED:.0f}% of its peak).",
        f"Runs: {len(data.curves)}, of which {num_tuned} for tuning. {engines}.",
    ]
    unequal = data.conditions.get("unequal") or []
    if unequal:
        lines.append(f"Conditions that differ between runs and should not: {', '.join(unequal)}.")
    return lines


def _open_questions(data: StudyData, findings: Findings) -> list[str]:
    lines = ["One task, one small policy: whether the order of arms holds for large models is not tested here."]
    edge = [arm.label for arm in findings.arms if arm.at_end_of_ladder]
    if edge:
        lines.append(f"The best rate is the highest that was tried, so a better one may exist: {', '.join(edge)}.")
    if findings.missing:
        lines.append(f"Arms without all seeds: {', '.join(findings.missing)}.")
    if len(data.study.ladder.seeds) == 1:
        lines.append("Learning rates were chosen on one tuning seed, so neighbouring rates may be as good.")
    return lines


def as_markdown(blocks: Sequence[Block]) -> str:
    parts = []
    for block in blocks:
        if isinstance(block, Table):
            rows = [f"| {' | '.join(cells)} |" for cells in block.rows]
            rule = "|" + "---|" * len(block.header)
            parts.append("\n".join([f"*{block.title}*", "", f"| {' | '.join(block.header)} |", rule, *rows]))
        elif isinstance(block, Picture):
            parts.append(f"![{block.alt}]({IMAGES}/{block.file})")
        elif isinstance(block, list):
            parts.append("\n".join(f"- {line}" for line in block))
        else:
            parts.append(block)
    return "\n\n".join(parts) + "\n"


def _html_block(block: Block) -> str:
    """A block with its text escaped."""
    if isinstance(block, Table):
        return html_table(block, block.title)
    if isinstance(block, Picture):
        return f'<img src="{IMAGES}/{html.escape(block.file)}" alt="{html.escape(block.alt)}">'
    if isinstance(block, list):
        return f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in block)}</ul>"
    level = len(block) - len(block.lstrip("#"))
    return f"<h{level}>{html.escape(block[level:].strip())}</h{level}>" if level else f"<p>{html.escape(block)}</p>"


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
