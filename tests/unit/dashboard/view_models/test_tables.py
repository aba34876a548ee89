"""Tables of runs, plans and turns: what they contain, and files of them."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

import pandas as pd
import pytest

from gxpo_client.formats import literal
from gxpo_dashboard import labels
from gxpo_dashboard.charts.base import Chart
from gxpo_dashboard.charts.benchmarks import score_table
from gxpo_dashboard.view_models import tables
from gxpo_services.run_states import RunState
from gxpo_services.runs import listing
from gxpo_trainer.errors import REASONS

Json = dict[str, Any]


def run(**fields: Any) -> Json:
    progress = {"fraction": 0.5, "steps": 15, "backward_passes": 45, "backward_passes_budget": 90, "seconds_left": 75}
    base = {
        "id": "r1", "name": "a", "state": "running", "rule": "gxpo", "rule_label": "GXPO K=5", "model": "m", "seed": 0,
        "score": 0.4, "score_best": 0.45, "reward": "NaN", "tags": ["t"],
    }  # fmt: skip
    return base | {"progress": progress | fields.pop("progress", {})} | fields


def test_a_row_of_the_list() -> None:
    row = tables.runs_table([run()], baseline=run(score=0.35), trends={"r1": "data:"}).iloc[0]
    assert (row["progress"], row["score"], row["trend"]) == (50.0, 40.0, "data:")
    assert row["difference"] == pytest.approx(5.0)
    assert (row["passes"], row["left"], row["state"]) == ("45 of 90", "1 min 15 s", ["▶ running"])
    assert math.isnan(row["reward"])
    assert math.isnan(tables.runs_table([run()]).iloc[0]["difference"]), "without a baseline"
    (states,) = tables.runs_table([run(silent_s=34.0)])["state"]
    assert states == ["▶ running", "! no heartbeat"]


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
        order = tables.ordered(groups, "score_best", descending=descending)
        assert [group[0]["rule"] for group in order] == names
    assert tables.ordered(groups, "created_at", descending=True) == groups


def test_cells_are_words_with_a_true_minus_and_states_have_their_colour() -> None:
    rows = [
        run(score=0.3, reward=1.1, settings={"a": True, "b": 2}, created_at=1.5),
        run(score=0.5, reward=-0.034567, settings={}, silent_s=34.0, tags=[]),
    ]
    frame = tables.runs_table(rows, baseline=run(score=0.4))
    names = ["name", "state", "progress", "score", "difference", "reward", "config:a", "config:b", "created", "tags"]
    assert tables.cells(frame, names) == [
        ["a", [["▶ running", "blue"]], 50.0, "30.0%", "−10.0", "1.10", "true", "2", 1.5, [["t", "gray"]]],
        [
            "a",
            [["▶ running", "blue"], ["! no heartbeat", "orange"]],
            50.0,
            "50.0%",
            "+10.0",
            "−0.0346",
            "–",
            "–",
            None,
            [],
        ],
    ]


def test_a_waiting_run_shows_its_place() -> None:
    assert tables.time_left(run(progress={"queue_position": 2, "seconds_left": None})) == "queue: 2"
    assert tables.passes_used(run(progress={"backward_passes_budget": None})["progress"]) == "45"


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "-a\r=1"]


def rows(frame: pd.DataFrame) -> list[list[str]]:
    return list(csv.reader(io.StringIO(tables.csv_file(frame).decode(), newline="")))


@pytest.mark.parametrize("name", FORMULAS)
def test_neither_a_cell_nor_a_header_of_a_table_is_a_formula(name: str) -> None:
    points = pd.DataFrame({"series": [name] * 2, "x": [0, 1], "y": [-0.5, float("nan")]})
    chart = Chart("key", "Title", {}, {"points": points}, "y over x", "summary", "note")
    assert rows(chart.table()) == [["X", f"'{name}"], ["0", "-0.5"], ["1", ""]]
    scores = {"benchmark": "math500", "series": name, "step": 3, "y": 0.5, "low": 0.25, "high": 0.75}
    table = rows(score_table(pd.DataFrame([scores])))
    assert table[1][table[0].index("Run")] == f"'{name}"


def test_everything_else_is_written_as_it_is() -> None:
    frame = pd.DataFrame({"run": ["a=b", "ü,", None], "step": [-1, 2, 3], "score": [-0.25, float("nan"), 1e-9]})
    assert tables.csv_file(frame) == frame.to_csv(index=False, lineterminator="\r\n").encode()
    assert [literal(value) for value in (-1, -0.5, None, True, "a")] == [-1, -0.5, None, True, "a"]


GIB = 2**30


def a_plan(**changes: Any) -> dict[str, Any]:
    seconds = {"sampling": 30.0, "verify": 0.5, "passes": 60.0, "look_ahead": 2.0, "sync": 1.5, "other": 1.0}
    rule = {
        "label": "GXPO K=5",
        "own": True,
        "seconds": seconds | {"step": 95.0},
        "backward_passes": 900,
        "hours": 7.5,
        "gpu_hours": 30.0,
    }
    plan = {
        "device": "h100-80",
        "devices_needed": 4,
        "shared_devices": False,
        "fits": True,
        "advice": None,
        "memory": [
            {
                "phase": "learner",
                "needed_bytes": 3 * GIB,
                "limit_bytes": 80 * GIB,
                "parts": [{"name": "weights", "bytes": GIB}, {"name": "optimizer", "bytes": 2 * GIB}],
            }
        ],
        "rules": [rule, rule | {"label": "GRPO", "own": False, "hours": None, "gpu_hours": None}],
    }
    return plan | changes


def test_the_verdict_names_the_devices_or_the_setting_to_change() -> None:
    assert tables.verdict(a_plan()) == "Fits on 4 × h100-80."
    assert tables.verdict(a_plan(shared_devices=True)) == "Fits on 4 × h100-80, shared by learner and sampler."
    assert tables.verdict(a_plan(device="cpu")) == "Planned for a host without GPUs."
    refused = a_plan(fits=False, advice="learner: needs 90.0 GiB; set learner.zero_stage = 3")
    assert tables.verdict(refused) == "Learner: needs 90.0 GiB; set learner.zero_stage = 3."


def test_rows_of_time_mark_the_runs_own_rule() -> None:
    own, other = tables.time_table(a_plan()).values.tolist()
    assert own == ["GXPO K=5 (this run)", "30 s", "1 min 2 s", "1 min 35 s", "900", "7 h 30 min", "30"]
    assert other[0] == "GRPO"
    assert other[-2:] == ["–", "–"]


def test_rows_of_memory_are_by_phase_the_largest_part_first() -> None:
    assert tables.memory_table(a_plan()).values.tolist() == [
        ["learner", "total", "3.0 GiB of 80.0 GiB"],
        ["", "optimizer", "2.0 GiB"],
        ["", "weights", "1.0 GiB"],
    ]


def item(turns: list[dict[str, Any]] | None, **fields: Any) -> dict[str, Any]:
    return {"turns": turns, "end": "done", "length": 20, "sampled_length": 15, "reward": 1.0, **fields}


def turn(speaker: str, text: str, reward: float | None = None) -> dict[str, Any]:
    return {"speaker": speaker, "text": text, "reward": reward}


def test_a_row_says_who_spoke_and_which_reward_it_gave() -> None:
    turns = [
        turn("policy", "<calc>2+2</calc>"),
        turn("environment", "4", -0.25),
        turn("policy", "\\boxed{4}"),
        turn("environment", "", 1.0),
    ]
    assert tables.turn_rows(item(turns)) == [
        ("Policy, turn 1", "<calc>2+2</calc>"),
        ("Environment, turn 1, reward −0.25", "4"),
        ("Policy, turn 2", "\\boxed{4}"),
        ("Environment, turn 2, reward +1.00", ""),
    ]


def test_a_response_of_a_single_turn_has_neither_rows_nor_facts() -> None:
    old = {"response": "5", "length": 1, "reward": 1.0}
    assert (tables.turn_rows(old), tables.episode_facts(old)) == ([], "")
    new = item(None, end=None, sampled_length=None)
    assert (tables.turn_rows(new), tables.episode_facts(new)) == ([], "")


def test_facts_say_how_it_ended_and_where_the_reward_came_from() -> None:
    policy = [turn("policy", "\\boxed{4}")]
    assert tables.episode_facts(item(policy)) == (
        "ended by the environment, 15 of 20 tokens by the policy, reward from the verifier"
    )
    rewarded = [*policy, turn("environment", "", 0.0)]
    assert tables.episode_facts(item(rewarded, end="max_turns")) == (
        "turn limit reached, 15 of 20 tokens by the policy, reward from the environment"
    )
    assert tables.episode_facts(item(policy, extra={"branches": 1})) == (
        "ended by the environment, 15 of 20 tokens by the policy, 2 rows of tokens, reward from the verifier"
    )
    assert tables.episode_facts(item(policy, end="timeout", reward=None)) == (
        "environment timed out, 15 of 20 tokens by the policy"
    )


def test_an_unknown_speaker_or_end_is_shown_without_its_text_as_a_label() -> None:
    assert tables.turn_rows(item([turn("**tool**", "x")])) == [("Unknown, turn 0", "x")]


def test_equal_answers_are_merged_and_the_worst_is_first() -> None:
    answered = [
        ("wrong", "4", 0.0),
        ("correct", "5", 1.0),
        ("wrong", "3", 0.0),
        ("wrong", "3", 0.0),
        ("error", "", None),
    ]
    items = [{"verdict": verdict, "extracted": answer, "reward": reward} for verdict, answer, reward in answered]
    assert [(group[0]["extracted"], len(group)) for group in tables.answers(items)] == [
        ("", 1), ("3", 2), ("4", 1), ("5", 1)
    ]  # fmt: skip
    shares = [(2, 8, 0.9), (0, 8, 0.2), (0, 8, 0.1), (1, 4, None)]
    groups = [{"correct": correct, "responses": of, "reward": reward} for correct, of, reward in shares]
    assert [group["reward"] for group in tables.worst_first(groups)] == [0.1, 0.2, None, 0.9]


def test_every_order_of_a_column_is_known_to_the_service_and_shown_in_that_column() -> None:
    assert {name for name in tables.ORDERS.values() if not name.startswith(tables.METRIC)} <= set(listing.COLUMNS)
    assert set(tables.ORDERS) <= set(tables.COLUMNS)
    shown = {order: tables.ordered_column(order) for order in ("score", "score_best", "metric:reward/mean", "metric:m")}
    assert list(shown.values()) == ["score", "best", "reward", "metric:m"]


# Untrusted text is harmless, and states, reasons and runs have words.


@pytest.mark.parametrize(
    "text", ["[a](http://x)", "**b**", "<script>", ":red[c]", "$x$", "# d", "`e`", "~~f~~", "![g](h)", "| i |", "1. j"]
)
def test_markdown_is_escaped(text: str) -> None:
    escaped = labels.plain(text)
    for mark in "[]()*<>:$#`~!|":
        assert escaped.count(mark) == escaped.count(f"\\{mark}")
    assert escaped.replace("\\", "").replace("\u2060", "") == text


def test_addresses_do_not_become_links() -> None:
    for text in ("http://x.org", "see www.x.org", "mail a@b.org"):
        escaped = labels.plain(text).replace("\\", "")
        assert not any(mark in escaped for mark in ("://", "www.", "@b"))


def test_formulas_are_set_and_everything_else_stays_text() -> None:
    rendered = labels.with_formulas("so $x^2$ and **bold** [link](http://a)")
    assert rendered is not None
    assert rendered.startswith("so $x^2$ and ")
    assert r"\*\*bold\*\*" in rendered
    assert r"\[link\]" in rendered
    assert labels.with_formulas(r"\[ \frac{1}{2} \] done") == r"$\frac{1}{2}$ done"
    assert labels.with_formulas("from $5 to $6, not $ 7 $") is None
    assert labels.with_formulas(r"$\href{javascript:alert(1)}{x}$") is None
    assert labels.with_formulas("$`x`$") is None


def test_words_that_differ_have_a_background_and_all_text_is_escaped() -> None:
    assert labels.differing("12*7 = 84", "12+7 = 84") == r"12:orange-background[\*]7 \= 84"
    assert labels.differing("one two\nthree four", "one\nthree four") == "one :orange-background[two]  \nthree four"
    assert labels.differing("same", "same") == "same"


def test_every_state_and_reason_has_words() -> None:
    assert set(labels.STATES) == set(RunState)
    assert set(REASONS) <= set(labels.REASONS)


def test_names_that_repeat_are_told_apart() -> None:
    views = {
        "r000001": {"name": "a", "seed": 0}, "r000002": {"name": "a", "seed": 1}, "r000003": {"name": "b", "seed": 0},
        "r000004": {"name": "c", "seed": 0}, "r000005": {"name": "c", "seed": 0},
    }  # fmt: skip
    assert list(labels.unique_labels(views).values()) == [
        "a (seed 0)", "a (seed 1)", "b", "c (000004)", "c (000005)"
    ]  # fmt: skip
