"""Foreign text is harmless, numbers are readable, rows hold what the list contains."""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import unquote

import pytest

from gxpo_client import formats
from gxpo_dashboard import labels as texts
from gxpo_dashboard.view_models import tables

Json = dict[str, Any]


@pytest.mark.parametrize(
    "text", ["[a](http://x)", "**b**", "<script>", ":red[c]", "$x$", "# d", "`e`", "~~f~~", "![g](h)", "| i |", "1. j"]
)
def test_markdown_is_escaped(text: str) -> None:
    shown = texts.plain(text)
    for mark in "[]()*<>:$#`~!|":
        assert shown.count(mark) == shown.count(f"\\{mark}")
    assert shown.replace("\\", "").replace("\u2060", "") == text


def test_addresses_do_not_become_links() -> None:
    for text in ("http://x.org", "see www.x.org", "mail a@b.org"):
        shown = texts.plain(text).replace("\\", "")
        assert not any(mark in shown for mark in ("://", "www.", "@b"))


def test_lines_are_joined() -> None:
    assert texts.plain("a\n\n# b") == "a \\# b"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.0 s"), (0.0042, "4.2 ms"), (4.24, "4.2 s"), (59, "59 s"), (75, "1 min 15 s"), (11520, "3 h 12 min"),
        (200_000, "2 d 7 h"), (None, "–"), (math.nan, "–"),
    ],
)  # fmt: skip
def test_durations(seconds: float | None, words: str) -> None:
    assert formats.duration(seconds) == words


def test_figures() -> None:
    assert formats.percent(0.4132) == "41.3%"
    assert formats.count(12345.0) == "12,345"
    assert formats.count(1.5) == "1.50"
    assert formats.figure(0.00012346) == "0.0001235"
    assert formats.size(1536) == "1.5 KiB"
    assert formats.size(512) == "512 B"
    assert formats.moment(0) == "1970-01-01 00:00:00 UTC"
    assert formats.percent(math.nan) == formats.NONE
    assert (formats.figure(-1.5), formats.count(-2), formats.percent(-0.5)) == ("−1.5", "−2", "−50.0%")
    assert formats.figure(1e-7) == "1e−07"


def run(**fields: Any) -> Json:
    progress = {"fraction": 0.5, "steps": 15, "backward_passes": 45, "backward_passes_budget": 90, "seconds_left": 75}
    base = {
        "id": "r1", "name": "a", "state": "running", "rule": "gxpo", "rule_label": "GXPO K=5", "model": "m", "seed": 0,
        "score": 0.4, "score_best": 0.45, "reward": "NaN", "tags": ["t"],
    }  # fmt: skip
    return base | {"progress": progress | fields.pop("progress", {})} | fields


def test_a_row_of_the_list() -> None:
    row = tables.runs_table([run()], baseline=run(score=0.35), trends={"r1": [1.0, 2.0]}).iloc[0]
    assert (row["progress"], row["score"], row["trend"]) == (50.0, 40.0, [1.0, 2.0])
    assert row["difference"] == pytest.approx(5.0)
    assert (row["passes"], row["left"], row["state"]) == ("45 of 90", "1 min 15 s", ["▶ running"])
    assert math.isnan(row["reward"])


def test_without_a_baseline_there_is_no_difference() -> None:
    assert math.isnan(tables.runs_table([run()]).iloc[0]["difference"])


def test_a_name_is_a_link_whose_fragment_is_the_name() -> None:
    link = tables.runs_table([run(name="k=5, α #2")]).iloc[0]["name"]
    address, _, name = link.partition("#")
    assert address == "?view=run&run=r1"
    assert unquote(name) == "k=5, α #2"


def test_settings_and_metrics_are_columns() -> None:
    row = tables.runs_table([run(metrics={"gate/z": "NaN"}, settings={"a.b": [1], "c": 2})]).iloc[0]
    assert (row["config:a.b"], row["config:c"]) == ("[1]", 2)
    assert math.isnan(row["metric:gate/z"])
    assert tables.further(["name", "metric:gate/z", "config:c"], tables.METRIC) == ["gate/z"]


def test_columns_without_a_value_are_hidden() -> None:
    frame = tables.runs_table([run(tags=[], reason=None), run(tags=[], reason="")])
    assert tables.filled(frame, ["name", "tags", "reason", "reward", "score"]) == ["name", "score"]


def test_seeds_of_a_configuration_are_one_row_with_means() -> None:
    def seed(number: int, score: float, rate: float) -> Json:
        settings = {"learner": {"lr": rate}, "seed": number}
        return run(id=f"r{number}", seed=number, score=score, state="succeeded", settings=settings)

    failed = seed(3, 0.1, 1e-5) | {"state": "failed"}
    runs = [seed(0, 0.4, 1e-5), seed(1, 0.6, 1e-5), seed(2, 0.9, 3e-5) | {"state": "running"}, failed]
    groups = tables.configurations(runs, ["learner"])
    assert [[item["id"] for item in group] for group in groups] == [["r0", "r1", "r3"], ["r2"]]
    runs[0]["progress"] = {"backward_passes": 40.0, "backward_passes_budget": 90, "training_s": 60.0, "tokens": 1000}
    runs[1]["progress"] = {"backward_passes": 50.0, "backward_passes_budget": 90, "training_s": 120.0, "tokens": None}
    frame = tables.means(tables.runs_table(runs), runs, [[0, 1, 3], [2]])
    assert frame.loc[0, ["passes", "training", "tokens", "left"]].tolist() == ["45 of 90", "1 min 30 s", "1,000", "–"]
    assert frame["score"].tolist() == [pytest.approx(50.0), 90.0]
    assert frame["state"].tolist() == [["✔ succeeded", "✘ failed"], ["▶ running"]]
    assert frame["id"].tolist() == ["various", "r2"]
    assert frame[["runs", "seed", "name"]].values.tolist() == [["2 of 3", "0, 1, 3", "GXPO K=5"], ["1", "2", "a"]]
    none_succeeded = tables.means(tables.runs_table([failed, failed]), [failed, failed], [[0, 1]])
    assert none_succeeded["runs"].tolist() == ["0 of 2"]
    assert math.isnan(none_succeeded.loc[0, "score"])


def test_configurations_are_ordered_by_their_mean_and_not_by_their_best_seed() -> None:
    def runs(rule: str, *scores: float | None) -> list[Json]:
        return [run(rule=rule, state="succeeded", score_best=score) for score in scores]

    groups = [runs("lucky", 0.9, 0.1, 0.2), runs("none", None, None), runs("steady", 0.5, 0.5)]
    # Means: 0.4, none and 0.5.
    for descending, names in ((True, ["steady", "lucky", "none"]), (False, ["lucky", "steady", "none"])):
        found = tables.ordered(groups, "score_best", descending=descending)
        assert [group[0]["rule"] for group in found] == names
    assert tables.ordered(groups, "created_at", descending=True) == groups


def test_numbers_of_the_table_have_a_true_minus_and_booleans_are_words() -> None:
    rows = [run(score=0.3, reward=1.1, settings={"a": True, "b": 2}), run(score=0.5, reward=-0.034567, settings={})]
    frame = tables.runs_table(rows, baseline=run(score=0.4))
    words = {name: [form(value) for value in frame[name]] for name, form in tables.written(frame).items()}
    assert words["difference"] == ["−10.0", "+10.0"]
    assert words["reward"] == ["1.10", "−0.0346"]
    assert words["score"] == ["30.0%", "50.0%"]
    assert frame.loc[0, "config:a"] == "true"


def test_formulas_are_set_and_everything_else_stays_text() -> None:
    found = texts.with_formulas("so $x^2$ and **bold** [link](http://a)")
    assert found is not None
    assert found.startswith("so $x^2$ and ")
    assert r"\*\*bold\*\*" in found
    assert r"\[link\]" in found
    assert texts.with_formulas(r"\[ \frac{1}{2} \] done") == r"$\frac{1}{2}$ done"
    assert texts.with_formulas("from $5 to $6, not $ 7 $") is None
    assert texts.with_formulas(r"$\href{javascript:alert(1)}{x}$") is None
    assert texts.with_formulas("$`x`$") is None


def test_a_waiting_run_shows_its_place() -> None:
    assert tables.time_left(run(progress={"queue_position": 2, "seconds_left": None})) == "queue: 2"
    assert tables.passes_used(run(progress={"backward_passes_budget": None})["progress"]) == "45"


def test_every_state_and_reason_has_words() -> None:
    from gxpo_services.run_states import RunState
    from gxpo_trainer.errors import REASONS

    assert set(texts.STATES) == set(RunState)
    assert set(REASONS) <= set(texts.REASONS)


def test_names_that_repeat_are_told_apart() -> None:
    views = {
        "r000001": {"name": "a", "seed": 0}, "r000002": {"name": "a", "seed": 1}, "r000003": {"name": "b", "seed": 0},
        "r000004": {"name": "c", "seed": 0}, "r000005": {"name": "c", "seed": 0},
    }  # fmt: skip
    assert list(texts.unique_labels(views).values()) == [
        "a (seed 0)", "a (seed 1)", "b", "c (000004)", "c (000005)"
    ]  # fmt: skip
