"""Every figure of docs/evidence.md that comes from the shipped data, recomputed with pandas and SciPy alone.

No code of the package: what is tested is its analysis. Cells are compared as text, so to the last digit printed.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, stats

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "studies" / "reference"
PAGE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
STUDY = json.loads((FOLDER / "study.json").read_text(encoding="utf-8"))["study"]
RUNS = pd.read_parquet(FOLDER / "runs.parquet")
ALL = pd.read_parquet(FOLDER / "evaluations.parquet").sort_values(["arm", "seed", "step"])
REPORTED = ALL[ALL.stage == "report"].set_index(["arm", "seed"])
BASE, SEEDS, BUDGET = STUDY["baseline"], STUDY["seeds"], STUDY["backward_passes"]
LABELS = {arm: body["label"] for arm, body in STUDY["arms"].items()}
ORDER = [BASE, *(arm for arm in LABELS if arm != BASE)]
PLAN = STUDY["analysis"]
COSTS = ("steps", "backward_passes", "token_passes")
NOUNS = dict(zip(COSTS, ("batches", "backward passes", "token-passes"), strict=True))


def curves() -> dict[str, list[pd.DataFrame]]:
    found = {}
    for arm in ORDER:
        row = RUNS[(RUNS.stage == "report") & (RUNS.arm == arm)]
        # The gate is off and no arm has a forward pass of its own, so that every step has the same passes.
        per_step = (row.backward_passes / row.steps).unique()
        assert len(per_step) == 1
        found[arm] = [
            REPORTED.loc[(arm, seed)].reset_index().assign(
                steps=lambda d: d.step, token_passes=lambda d, p=per_step[0]: d.tokens * p
            )
            for seed in SEEDS
        ]  # fmt: skip
    return found


CURVES = curves()


def t_interval(values: np.ndarray) -> tuple[float, float, float]:
    low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    return float(np.mean(values)), float(low), float(high)


def bracket(values: np.ndarray, form: str = "+.1f", unit: str = "") -> str:
    mean, low, high = (f"{100 * value:{form}}" for value in t_interval(np.asarray(values)))
    return f"{mean}{unit} [{low}, {high}]".replace("-", "−")


def p_text(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def holm(values: dict) -> dict:
    """Textbook form: reject in order while p ≤ α/(m − k); adjusted p by the running maximum."""
    ranked = sorted((p, key) for key, p in values.items() if p is not None)
    running = itertools.accumulate((min(1.0, p * (len(ranked) - k)) for k, (p, _) in enumerate(ranked)), max)
    return {key: adjusted for (_, key), adjusted in zip(ranked, running, strict=True)}


def tost(values: np.ndarray, margin: float) -> float:
    """Of two one-sided tests that the mean is within the margin."""
    sides = ((-margin, "greater"), (margin, "less"))
    return max(float(stats.ttest_1samp(values, bound, alternative=side).pvalue) for bound, side in sides)


def rows_below(heading: str, table: int = 0) -> list[list[str]]:
    """Cells of a table of a section, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [block for block in section.split("\n\n") if block.startswith("| ")][table].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


WINDOW = {arm: [c[c.backward_passes >= (1 - PLAN["plateau"]) * BUDGET] for c in runs] for arm, runs in CURVES.items()}
PLATEAU = {arm: np.array([c.accuracy.mean() for c in runs]) for arm, runs in WINDOW.items()}
DIFFERENCE = {arm: PLATEAU[arm] - PLATEAU[BASE] for arm in ORDER[1:]}
MARGIN = PLAN["margin"]
P = {arm: stats.ttest_rel(PLATEAU[arm], PLATEAU[BASE]).pvalue for arm in ORDER[1:]}
TOST = {arm: tost(d, MARGIN) for arm, d in DIFFERENCE.items()}
P_HOLM, TOST_HOLM = holm(P), holm(TOST)


def verdict(arm: str) -> str:
    words = [("higher" if DIFFERENCE[arm].mean() > 0 else "lower")] if P_HOLM[arm] < 0.05 else []
    if TOST_HOLM[arm] < 0.05:
        words.append("equivalent within 1 point")
    return ", ".join(words) or "not shown equivalent"


def test_the_plateaus() -> None:
    expected = []
    for arm in ORDER:
        last = np.array([c.accuracy.iloc[-1] for c in CURVES[arm]])
        row = [LABELS[arm], bracket(last, ".1f", "%"), bracket(PLATEAU[arm], ".1f", "%")]
        if arm == BASE:
            expected.append([*row, *["–"] * 7])
            continue
        scores = [np.mean([np.stack(c.per_problem).mean(axis=0) for c in WINDOW[a]], axis=0) for a in (arm, BASE)]
        welch = stats.ttest_ind(PLATEAU[arm], PLATEAU[BASE], equal_var=False).pvalue
        tests = map(p_text, (P[arm], P_HOLM[arm], welch, TOST_HOLM[arm]))
        expected.append([*row, bracket(DIFFERENCE[arm]), bracket(scores[0] - scores[1]), *tests, verdict(arm)])
    assert rows_below("At the plateau") == expected
    first = min(c.backward_passes.min() for runs in WINDOW.values() for c in runs)
    assert f"evaluations from {first:g} to {BUDGET} backward passes" in PAGE
    start = REPORTED[REPORTED.step == 0].accuracy.groupby("seed")
    assert f"differ by up to {100 * (start.max() - start.min()).max():.1f} points between arms" in PAGE


def test_the_difference_that_would_show() -> None:
    pooled = math.sqrt(np.mean([d.var(ddof=1) for d in DIFFERENCE.values()]))
    degrees = len(SEEDS) - 1
    critical = stats.t.ppf(1 - 0.05 / len(DIFFERENCE) / 2, degrees)

    def power(effect: float) -> float:
        shift = effect / (pooled / math.sqrt(len(SEEDS)))
        return float(stats.nct.sf(critical, degrees, shift))

    effect = optimize.brentq(lambda effect: power(effect) - 0.8, 1e-4, 0.05)
    assert f"with 80% probability, a difference of {100 * effect:.1f} points" in PAGE


def test_the_differences_at_equal_cost() -> None:
    least = min(c.token_passes.iloc[-1] for runs in CURVES.values() for c in runs)

    def differences(arm: str, axis: str, cost: float) -> np.ndarray:
        own, base = ([np.interp(cost, c[axis], c.accuracy) for c in CURVES[a]] for a in (arm, BASE))
        return np.subtract(own, base)

    columns = [("backward_passes", cost) for cost in (*STUDY["compare_at"], BUDGET)] + [("token_passes", least)]
    most = {arm: max(set(CURVES[arm][0].steps) & set(CURVES[BASE][0].steps)) for arm in ORDER[1:]}
    cells = {(arm, *c): differences(arm, *c) for arm in ORDER[1:] for c in [*columns, ("steps", most[arm])]}
    p_values, equivalences = {}, {}
    for axis in COSTS:
        of_axis = {key: d for key, d in cells.items() if key[1] == axis}
        p_values |= holm({key: stats.ttest_1samp(d, 0).pvalue for key, d in of_axis.items()})
        equivalences |= holm({key: tost(d, MARGIN) for key, d in of_axis.items()})

    def cell(key: tuple) -> str:
        equal = f"; equivalent, p {p_text(equivalences[key])}" if equivalences[key] < 0.05 else ""
        return f"{bracket(cells[key])}, p {p_text(p_values[key])}{equal}"

    expected = [
        [
            LABELS[arm],
            *(cell((arm, *column)) for column in columns),
            f"at {most[arm]}: {cell((arm, 'steps', most[arm]))}",
        ]
        for arm in ORDER[1:]
    ]
    assert rows_below("At equal cost") == expected
    assert f"| {least / 1e3:.0f}k token-passes |" in PAGE


BEST = max(values.mean() for values in PLATEAU.values())
TARGETS = [share * BEST for share in PLAN["targets"]]


@functools.cache
def grid(axis: str) -> list[float]:
    """The points at which every arm that ran so far was evaluated."""
    runs = [set(c[axis]) for runs in CURVES.values() for c in runs]
    return sorted(x for x in set.union(*runs) if all(x in own or x > max(own) for own in runs))


def monotone(values: np.ndarray) -> np.ndarray:
    """Isotonic regression by its min-max formula: max over i ≤ k of min over j ≥ k of the mean of i … j."""
    n = len(values)
    return np.array([max(min(values[i : j + 1].mean() for j in range(k, n)) for i in range(k + 1)) for k in range(n)])


def crossing(x: np.ndarray, accuracy: np.ndarray, target: float) -> float | None:
    """Where the monotone curve reaches the target."""
    curve = monotone(accuracy)
    k = int(np.argmax(curve >= target - 1e-12))
    share = (target - curve[k - 1]) / (curve[k] - curve[k - 1]) if k else 0
    return x[k - 1] + share * (x[k] - x[k - 1]) if curve[-1] >= target else None


@functools.cache
def costs_of(arm: str, axis: str, target: float) -> tuple[list, list]:
    """First crossing on the grid, and on the monotone curve, by seed; None where it is not reached."""
    on = "steps" if axis == "steps" else "backward_passes"
    first, between = [], []
    for c in CURVES[arm]:
        c = c[c[on].isin(grid(on))]
        reached = c[axis][c.accuracy >= target]
        first.append(float(reached.iloc[0]) if len(reached) else None)
        between.append(crossing(c[axis].to_numpy(float), c.accuracy.to_numpy(), target))
    return (first if axis == on else []), between


def logs(arm: str, axis: str, target: float) -> list[np.ndarray | None]:
    """Logarithms of the baseline's cost over the arm's, of both kinds."""
    pairs = zip(costs_of(arm, axis, target), costs_of(BASE, axis, target), strict=True)
    return [np.log(np.divide(b, own)) if own and None not in own and None not in b else None for own, b in pairs]


def ratio_text(values: np.ndarray | None) -> str:
    if values is None:
        return "–"
    mean, low, high = (
        f"{math.exp(value):.2f}" for value in (t_interval(values) if np.ptp(values) > 1e-12 else [values[0]] * 3)
    )
    return mean if low == high else f"{mean} [{low}, {high}]"


@pytest.mark.parametrize(("number", "axis"), list(enumerate(COSTS)))
def test_the_costs_of_the_targets(number: int, axis: str) -> None:
    unit, digits = (1e-3, 0) if axis == "token_passes" else (1, 1)
    own = [[np.mean(kind) for kind in costs_of(BASE, axis, target) if kind] for target in TARGETS]
    expected = [
        [f"{LABELS[BASE]}: its cost", bracket(PLATEAU[BASE], ".1f", "%")]
        + ["; ".join(f"{unit * cost:.{digits}f}" for cost in costs) for costs in own]
    ]
    for arm in ORDER[1:]:
        kinds = [logs(arm, axis, target) for target in TARGETS]
        texts = [[ratio_text(kind) for kind in (both if axis != "token_passes" else both[1:])] for both in kinds]
        cells = ["–" if set(text) == {"–"} else "; ".join(text) for text in texts]
        expected.append([LABELS[arm], f"{bracket(DIFFERENCE[arm])}: {verdict(arm)}", *cells])
    assert rows_below("Cost to reach a target", number) == expected
    assert f"shares of the best plateau ({100 * BEST:.1f}%)" in PAGE


def savings() -> dict[tuple[str, str], str]:
    """By arm and cost: whether it differs at every target, and by how much. All are corrected for, tested or not."""
    p_values, ranges = dict.fromkeys(itertools.product(ORDER[1:], COSTS), 1.0), {}
    for arm, axis in itertools.product(ORDER[1:], COSTS):
        kinds = [logs(arm, axis, target)[1] for target in TARGETS]
        means = [kind.mean() for kind in kinds if kind is not None]
        if len(means) == len(TARGETS) and len({mean > 0 for mean in means}) == 1:
            p_values[arm, axis] = max(stats.ttest_1samp(kind, 0).pvalue for kind in kinds)
            low, high = sorted(np.exp(np.abs([min(means, key=abs), max(means, key=abs)])))
            ranges[arm, axis] = f"{low:.1f} to {high:.1f} times {'fewer' if means[0] > 0 else 'more'} {NOUNS[axis]}"
    shown = {key for key, p in holm(p_values).items() if p < 0.05}
    return {
        (arm, axis): ranges[arm, axis]
        if (arm, axis) in shown
        else f"no difference in {NOUNS[axis]} shown at every target"
        for arm, axis in itertools.product(ORDER[1:], COSTS)
    }


def test_what_follows_and_the_summary() -> None:
    told = savings()
    plateaus = {arm: f"{bracket(DIFFERENCE[arm])}: {verdict(arm)}" for arm in ORDER[1:]}
    for arm in ORDER[1:]:
        costs = ", ".join(told[arm, axis] for axis in COSTS)
        assert f"\n- {LABELS[arm]}: {costs}; plateau {plateaus[arm]}.\n" in PAGE
    summary = [line for line in PAGE.split("\n## ")[0].splitlines() if line.startswith("- ")]
    assert len(summary) <= 10
    assert f"{LABELS[BASE]} ends at {bracket(PLATEAU[BASE], '.1f', '%')} of the held-out problems" in summary[1]
    groups: dict[str, list[str]] = {}
    for arm in ORDER[1:]:
        groups.setdefault(verdict(arm), []).append(f"{LABELS[arm]} {bracket(DIFFERENCE[arm])}")
    for word, arms in groups.items():
        assert f"{word}: {', '.join(arms)}" in summary[2]
    assert ("none is shown to be higher" in summary[2]) == (not any("higher" in word for word in groups))
    ends = [sum("higher" in verdict(arm) for arm in ORDER[1:]), sum("lower" in verdict(arm) for arm in ORDER[1:])]
    numbers = []
    for line, axis in zip(summary[3:5], ("backward_passes", "steps"), strict=True):
        faster = [
            f"{LABELS[a]} ({told[a, axis]}, plateau {plateaus[a]})" for a in ORDER[1:] if "fewer" in told[a, axis]
        ]
        numbers.append(len(faster))
        assert line.endswith(f"best plateau: {'; '.join(faster) or 'shown for no arm'}.")
    passes, batches, higher, lower = (number or "none" for number in (*numbers, *ends))
    need = f"Shown to need fewer backward passes: {passes}; fewer batches: {batches}."
    assert summary[0].endswith(f" {need} Shown to end higher: {higher}; lower: {lower}.")


def test_the_learning_rates_and_diagnostics() -> None:
    ladder = RUNS[RUNS.stage == "ladder"]
    rates = sorted(ladder.learning_rate.unique())
    expected = []
    for arm in ORDER:
        own = ladder[ladder.arm == arm].groupby("learning_rate").accuracy.mean()
        runs = int((ladder.arm == arm).sum())
        chosen = RUNS[(RUNS.stage == "report") & (RUNS.arm == arm)].learning_rate.iloc[0]
        if runs:
            assert chosen == own.idxmax()
        cells = [f"{100 * own[rate]:.1f}" if rate in own else "–" for rate in rates]
        expected.append([LABELS[arm], str(runs) if runs else "0, rate of another arm", *cells, f"{chosen:g}"])
    assert rows_below("Tuning") == expected
    assert f"- Runs: {len(RUNS)}, of which {len(ladder)} for tuning." in PAGE
    names = "theta_k_relative_error retention_mean scale_mean displacement_ratio cos_g0_slow inactive_fraction".split()
    for label, *cells, final in rows_below("Predictions and diagnostics")[:-1]:
        rows = RUNS[(RUNS.stage == "report") & (RUNS.arm == {v: k for k, v in LABELS.items()}[label])]
        medians = [rows[("grad/" if name.startswith("cos") else "gxpo/") + name].median() for name in names]
        assert cells == ["–" if math.isnan(value) else f"{value:.3f}" for value in medians]
        assert final == bracket(rows.accuracy.to_numpy(), ".1f", "%")


def test_small_steps() -> None:
    """The table of docs/algorithms/controls.md, and its tests of equivalence: the two looks at equal batches were not
    registered."""
    page = (ROOT / "docs" / "algorithms" / "controls.md").read_text(encoding="utf-8")
    body = json.loads((ROOT / "studies/small-steps/study.json").read_text(encoding="utf-8"))["study"]
    data = pd.read_parquet(ROOT / "studies" / "small-steps" / "evaluations.parquet")
    data = data[data.stage == "report"]
    margin, looks = body["analysis"]["margin"], {}
    for axis, cost, name in (
        ("step", 6, "batches"), ("step", 12, "batches"), ("backward_passes", body["backward_passes"], "passes"),
    ):  # fmt: skip
        at = data[data[axis] == cost].pivot_table(index="seed", columns="arm", values="accuracy")
        assert sorted(at.index) == body["seeds"]
        difference = (at["gxpo"] - at["longer-step"]).to_numpy()
        cells = [f"{100 * at[arm].mean():.1f}%" for arm in ("grpo", "longer-step", "gxpo")]
        assert f"| {name}: {cost} | {' | '.join([*cells, bracket(difference)])} |" in page
        p = tost(difference, margin)
        assert (p < 0.05) == (axis == "step" and cost == 12)
        if axis == "step":
            looks[cost] = p
    assert stats.ttest_1samp(difference, 0).pvalue < 0.001
    adjusted = holm(looks)[12]
    assert f"(two one-sided tests, p = {looks[12]:.3f}; {adjusted:.3f} after" in page
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"has {bracket(difference)} points against GRPO at 3.5 times" in readme
    assert f"(p = {adjusted:.3f} over two looks" in readme


@pytest.mark.parametrize(
    ("study", "name", "costs"),
    [
        ("tuned-words", "algorithms/candidates.md", (3, 6, 12, 24)),
        ("tuned-skill", "algorithms/candidates.md", (30, 60, 90, 150)),
        ("dense-skill", "sft.md", (30, 60, 90, 150)),
        ("distil-skill", "distillation.md", (30, 60, 90)),
    ],
)
def test_tuned_alike(study: str, name: str, costs: tuple[int, ...]) -> None:
    """The table of a page about the arms that were tuned by as many runs each."""
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    folder = ROOT / "studies" / study
    body = json.loads((folder / "study.json").read_text(encoding="utf-8"))["study"]
    runs = pd.read_parquet(folder / "runs.parquet")
    tuned = runs[runs.stage == "ladder"].groupby("arm").size()
    reported = runs[runs.stage == "report"].groupby("arm").size()
    arms = [arm for arm in body["arms"] if reported.get(arm) == len(body["seeds"])]
    assert "gxpo" in arms
    assert tuned[arms].nunique() == 1
    assert f"{tuned[arms[0]]} runs" in page
    data = pd.read_parquet(folder / "evaluations.parquet")
    data = data[data.stage == "report"]
    at = {cost: data[data.backward_passes == cost].pivot_table(index="seed", columns="arm", values="accuracy")
          for cost in costs}  # fmt: skip
    window = data[data.backward_passes >= (1 - body["analysis"]["plateau"]) * body["backward_passes"]]
    plateau = window.pivot_table(index="seed", columns="arm", values="accuracy")
    base, *others = arms
    if study == "tuned-skill":
        looks = {
            (arm, cost): (table[arm] - table[base]).to_numpy()
            for cost in (*body["compare_at"], body["backward_passes"])
            for table in [data[data.backward_passes == cost].pivot_table("accuracy", "seed", "arm")]
            for arm in others
        }
        told = [bracket(d) for (arm, _), d in looks.items() if arm == "surprisal"]
        text = " ".join(page.split())
        form = "by {} points after 60 passes, {} after 90, {} after 120 and {} after 150."
        assert form.format(*told) in text
        p = holm({key: stats.ttest_1samp(d, 0).pvalue for key, d in looks.items()})
        assert 0.05 < p["surprisal", 150] == min(p["surprisal", cost] for cost in (60, 90, 120, 150))
        assert f"a difference (p = {p['surprisal', 150]:.3f} for the last) nor equality" in text
        equal = holm({key: tost(d, body["analysis"]["margin"]) for key, d in looks.items()})
        assert min(equal["surprisal", cost] for cost in (60, 90, 120, 150)) > 0.05
    assert sorted(plateau.index) == body["seeds"]
    difference = {arm: (plateau[arm] - plateau[base]).to_numpy() for arm in others}
    adjusted = holm({arm: stats.ttest_1samp(d, 0).pvalue for arm, d in difference.items()})
    for arm in (base, *others):
        points = runs[(runs.stage == "report") & (runs.arm == arm)]
        (point,) = {(row.learning_rate, row.settings) for row in points.itertuples()}
        settings = [word.split("=") for word in point[1].split()]
        words = ", ".join([f"{point[0]:g}", *(f"{name.rpartition('.')[2]} {value}" for name, value in settings)])
        cells = [f"{100 * at[cost][arm].mean():.1f}%" for cost in at]
        gain = [bracket(difference[arm]), p_text(adjusted[arm])] if arm != base else ["–", "–"]
        row = [body["arms"][arm]["label"], words, *cells, *gain]
        assert f"| {' | '.join(row)} |" in page, row
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for arm in ("gxpo",) if study == "tuned-words" else ("gxpo", "sfpo"):  # the others of that study are on its page
        assert bracket(difference[arm]) in readme, arm


def test_tokens_or_their_point() -> None:
    """The table of docs/algorithms/candidates.md that tells surprising tokens from their point."""
    page = (ROOT / "docs" / "algorithms" / "candidates.md").read_text(encoding="utf-8")
    folder = ROOT / "studies" / "tokens-words"
    body = json.loads((folder / "study.json").read_text(encoding="utf-8"))["study"]
    data = pd.read_parquet(folder / "evaluations.parquet")
    data = data[data.stage == "report"]
    window = data[data.backward_passes >= (1 - body["analysis"]["plateau"]) * body["backward_passes"]]
    plateau = window.pivot_table(index="seed", columns="arm", values="accuracy")
    assert sorted(plateau.index) == body["seeds"]
    targets = [share * plateau.mean().max() for share in body["analysis"]["targets"]]

    def costs(arm: str, target: float, axis: str = "backward_passes") -> list[float | None]:
        runs = [data[(data.arm == arm) & (data.seed == seed)].sort_values("step") for seed in body["seeds"]]
        return [crossing(run[axis].to_numpy(float), run.accuracy.to_numpy(), target) for run in runs]

    def p_values(arm: str, axis: str) -> list[float]:
        ratios = [np.log(np.divide(costs("grpo", target, axis), costs(arm, target, axis))) for target in targets]
        return [float(stats.ttest_1samp(values, 0).pvalue) for values in ratios]

    for words, arm, base in (
        ("all tokens with their hyperparameters, against GRPO with its own", "point", "grpo"),
        ("surprising tokens, against GRPO with its own", "surprisal", "grpo"),
        ("surprising tokens, against all tokens with the same", "surprisal", "point"),
    ):
        saved = [np.log(np.divide(costs(base, target), costs(arm, target))) for target in targets]
        cells = [*map(ratio_text, saved), bracket((plateau[arm] - plateau[base]).to_numpy())]
        assert f"| {words} | {' | '.join(cells)} |" in page, f"| {words} | {' | '.join(cells)} |"
    assert cells[5].endswith("[0.93, 1.29]")
    text, readme = (" ".join(p.split()) for p in (page, (ROOT / "README.md").read_text(encoding="utf-8")))
    *most, last = p_values("point", "backward_passes")
    assert f"(p ≤ {max(most):.4f} each, not corrected), and 95% does with p = {last:.4f}: 1.14 × fewer" in text
    # All three arms have as many passes over a token, so that token-passes are in proportion to the tokens.
    both = list(itertools.product(("point", "surprisal"), ("step", "backward_passes", "tokens")))
    adjusted = holm({key: max(p_values(*key)) for key in both})
    assert {f"{adjusted[arm, 'backward_passes']:.2f}" for arm, _ in both} == {"0.12"}
    assert "is shown for neither of the two (p = 0.12 each" in text
    assert "are shown for neither (p = 0.12)" in readme


@pytest.mark.parametrize("study", ["sweep-skill", "pilots-skill"])
def test_untuned_arms(study: str) -> None:
    """The tables of docs/algorithms/candidates.md on K, α, τ and the rate, and of the pilots on the second task. A gate
    that has fired makes steps cheaper, so arms are evaluated after different passes."""
    page = (ROOT / "docs" / "algorithms" / "candidates.md").read_text(encoding="utf-8")
    folder = ROOT / "studies" / study
    body = json.loads((folder / "study.json").read_text(encoding="utf-8"))["study"]
    data = pd.read_parquet(folder / "evaluations.parquet")
    data = data[data.stage == "report"].sort_values("step")
    base, bound = body["baseline"], body["backward_passes"]
    costs = [*body["compare_at"], bound]

    def of(arm: str) -> list[pd.DataFrame]:
        return [data[(data.arm == arm) & (data.seed == seed)] for seed in body["seeds"]]

    plateau, at = {}, {}
    for arm in body["arms"]:
        last = [run[run.backward_passes >= (1 - body["analysis"]["plateau"]) * bound] for run in of(arm)]
        plateau[arm] = np.array([run.accuracy.mean() for run in last])
        at[arm] = [np.array([np.interp(cost, run.backward_passes, run.accuracy) for run in of(arm)]) for cost in costs]
    difference = {arm: plateau[arm] - plateau[base] for arm in body["arms"] if arm != base}
    adjusted = holm({arm: stats.ttest_1samp(d, 0).pvalue for arm, d in difference.items()})
    for arm, about in body["arms"].items():
        gain = [bracket(difference[arm]), p_text(adjusted[arm])] if arm != base else ["–", "–"]
        row = [about["label"], *(f"{100 * accuracy.mean():.1f}%" for accuracy in at[arm]), *gain]
        assert f"| {' | '.join(row)} |" in page, row
    if study == "sweep-skill":
        looks = {(arm, i): at[arm][i] - at[base][i] for arm in difference for i in range(len(costs))}
        last = ("no-gate", len(costs) - 1)
        p = holm({key: stats.ttest_1samp(d, 0).pvalue for key, d in looks.items()})[last]
        words = f"by {bracket(difference['no-gate'])} points and the last value by {bracket(looks[last])}, p = {p:.3f}"
        assert f"the plateau differs {words} after the correction" in " ".join(page.split())
    else:
        split, nesterov = (bracket(at[arm][-1] - at[base][-1]) for arm in ("split-probe", "outer-nesterov"))
        assert f"is {split} points from GRPO after 150" in page
        assert f"differs from GRPO by {nesterov} points after 150 passes" in page


def test_sampling_ahead() -> None:
    """The sentences of docs/algorithms/asynchronous.md on plateaus against the strict run."""
    page = " ".join((ROOT / "docs" / "algorithms" / "asynchronous.md").read_text(encoding="utf-8").split())
    difference, adjusted, equal = {}, {}, {}
    for rule in ("gxpo", "grpo"):
        folder = ROOT / "studies" / f"asynchronous-{rule}"
        body = json.loads((folder / "study.json").read_text(encoding="utf-8"))["study"]
        data = pd.read_parquet(folder / "evaluations.parquet")
        data = data[(data.stage == "report") & (data.backward_passes >= 0.6 * body["backward_passes"])]
        plateau = data.pivot_table(index="seed", columns="arm", values="accuracy")
        own = {arm: (plateau[arm] - plateau["strict"]).to_numpy() for arm in body["arms"] if arm != "strict"}
        difference[rule] = {arm: bracket(d) for arm, d in own.items()}
        adjusted[rule] = holm({arm: stats.ttest_1samp(d, 0).pvalue for arm, d in own.items()})
        equal[rule] = holm({arm: tost(d, body["analysis"]["margin"]) for arm, d in own.items()})
    gxpo, grpo, p = difference["gxpo"], difference["grpo"], adjusted["gxpo"]
    assert f"differs by {gxpo['one-ahead']} points one step ahead (p = {p['one-ahead']:.3f} after" in page
    assert f"by {gxpo['two-ahead']} two steps ahead (p = {p['two-ahead']:.3f})" in page
    assert f"no loss of GXPO is shown: {gxpo['one-ahead-decoupled']} and {gxpo['decoupled']}." in page
    shown = {arm: value for arm, value in adjusted["grpo"].items() if value < 0.05}
    assert shown.keys() == {"one-ahead"}
    assert f"higher than that of the strict run, {grpo['one-ahead']} (p = {shown['one-ahead']:.3f})" in page
    assert f"by {grpo['one-ahead-decoupled']} one step ahead and by {grpo['decoupled']} two steps ahead" in page
    assert min(value for values in equal.values() for value in values.values()) > 0.05
