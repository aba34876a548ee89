"""`/compare` and `/groups/{id}/heatmap`: numbers worked by hand, on both databases."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import anyio
import httpx
import psutil
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import text
from sqlalchemy.orm import Session
from support import reporting
from support.http_server import HttpServer
from support.processes import is_alive
from support.reported_runs import add_group, add_run, config, evaluated_run, report
from support.service_processes import ServiceProcesses, until

from gxpo_services.api.errors import Invalid
from gxpo_services.auth.tokens import prepare_local
from gxpo_services.compare import service
from gxpo_services.compare.endpoints import in_worker
from gxpo_services.compare.schemas import CompareQuery
from gxpo_services.db.database import Database
from gxpo_services.settings import ServiceSettings

GRPO: dict[str, Any] = {"name": "grpo"}
GXPO: dict[str, Any] = {"name": "gxpo", "k": 5}
RISING = {0: [0.0, 0.5], 10: [0.25, 0.5], 20: [0.5, 0.75]}
FASTER = {0: [0.0, 0.5], 10: [0.5, 0.75], 20: [0.75, 1.0]}


def compare(client: TestClient, **query: Any) -> dict[str, Any]:
    content: dict[str, Any] = client.get("/api/v1/compare", params=query).raise_for_status().json()
    return content


def compare_here(database: Database, **query: Any) -> dict[str, Any]:
    """The same in this process, where a test can look inside."""
    with database.reading() as session:
        content: dict[str, Any] = json.loads(service.compare_as_json(session, CompareQuery(**query)))
    return content


def group(answer: dict[str, Any], name: str) -> dict[str, Any]:
    return next(group for group in answer["groups"] if group["name"] == name)


@pytest.fixture
def two(database: Database) -> tuple[str, str]:
    """GRPO ends at 62.5% after 20 steps, 20 passes, 12 min; GXPO is there at step 10, 30 passes, 6 min."""
    first = evaluated_run(database, config(GRPO, name="plain"), RISING)
    second = evaluated_run(database, config(GXPO, name='<b>fast</b>, "x"\n🦆'), FASTER, passes=3, shutoff=12)
    return first, second


def test_two_runs_by_hand(client: TestClient, two: tuple[str, str]) -> None:
    answer = compare(client, runs=list(two))
    assert (answer["baseline"], answer["metric"], answer["benchmarks"]) == ("GRPO", "pass@1", ["easy"])
    costs = ("accuracy", "steps", "backward_passes", "hours", "tokens", "token_passes")
    assert answer["target"] == dict(zip(costs, (0.625, 20, 20, 0.2, 2000, 2000), strict=True))
    fast = group(answer, "GXPO K=5")
    assert fast["peak"]["accuracy"] == 0.875
    assert fast["match"] == dict(zip(costs, (0.625, 10, 30, 0.1, 1000, 3000), strict=True))
    assert fast["plateau"] is None, "GXPO has no evaluation between 12 and 20 passes"
    run = fast["runs"][0]
    assert (run["id"], run["name"], run["seed"]) == (two[1], '<b>fast</b>, "x"\n🦆', 0)
    assert run["curve"]["accuracy"] == [0.25, 0.625, 0.875]
    assert run["curve"]["low"] == pytest.approx([0.15, 0.525, 0.775])
    assert (run["gate"]["threshold"], run["gate"]["shutoff_step"], run["gate"]["downsampled"]) == (0.5, 12, False)
    assert run["gate"]["z"][-2:] == pytest.approx([-1.1, 0.9])
    assert answer["missing"] == ["seeds shared with the baseline (1 of at least 3)"]
    assert answer["left_out"] == answer["differences"] == []
    # Within GRPO's 20 passes GXPO was evaluated before its first step alone.
    assert (answer["ranking"], fast["at_equal_passes"]) == (["GRPO", "GXPO K=5"], None)


def test_tables_are_the_papers_views(client: TestClient, two: tuple[str, str]) -> None:
    tables = compare(client, runs=list(two), budgets="20,60", x="backward_passes")["tables"]
    begins = ["Ranking at 20 backward passes,", "To match the best of GRPO", "Accuracy at equal budgets"]
    assert all(table["title"].startswith(begin) for table, begin in zip(tables, begins, strict=False))
    assert [row[:3] for row in tables[2]["rows"]] == [
        ["20 backward passes", "GRPO", "62.5%"], ["", "GXPO K=5", "25.0%"],
        ["60 backward passes", "GRPO", "62.5% (ended before)"], ["", "GXPO K=5", "87.5% (ended before)"],
    ]  # fmt: skip
    assert all(len(row) == len(table["header"]) for table in tables for row in table["rows"])


def test_the_sampling_share_is_that_of_the_baselines_runs(
    client: TestClient, database: Database, two: tuple[str, str]
) -> None:
    for run, (rollout, verify, step) in zip(two, [(2.0, 1.0, 4.0), (0.1, 0.0, 4.0)], strict=True):
        launched = reporting.launch(database, run, 2)
        times = {"time/rollout_s": rollout, "time/verify_s": verify, "time/step_s": step}
        row = reporting.metric_row(21, 2, **times)
        reporting.send(database, launched, reporting.body(1, 2, metrics=[row], offsets={"metrics": 20}))
    for query, title in (
        ({}, "75% of a step of GRPO (measured)"),
        ({"sampling_share": 0.5}, "50% of a step of GRPO (as given)"),
    ):
        titles = [table["title"] for table in compare(client, runs=list(two), **query)["tables"]]
        assert [each.endswith(title) for each in titles if each.startswith("When it pays")] == [True]


def test_the_baseline_may_be_named_by_configuration_run_or_name(client: TestClient, two: tuple[str, str]) -> None:
    for word in ("GXPO K=5", two[1], '<b>fast</b>, "x"\n🦆'):
        answer = compare(client, runs=list(two), baseline=word)
        assert answer["baseline"] == "GXPO K=5"
        assert group(answer, "GXPO K=5")["is_baseline"]
    refused = client.get("/api/v1/compare", params={"runs": list(two), "baseline": "PPO"})
    assert (refused.status_code, "'GRPO', 'GXPO K=5'" in refused.json()["detail"]) == (422, True)


def test_a_baseline_that_is_excluded_is_refused_with_its_reason(
    client: TestClient, database: Database, two: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = add_run(database, config(GXPO, 7, "waiting"))
    for word in (waiting, "waiting"):
        refused = client.get("/api/v1/compare", params={"runs": [*two, waiting], "baseline": word})
        (error,) = refused.json()["errors"]
        assert (refused.status_code, error["field"]) == (422, "baseline")
        assert error["message"] == "waiting is excluded: it has no evaluation (yet)"
    # A refresh does not load the runs again.
    load = Mock(wraps=service.loading.load)
    monkeypatch.setattr(service.loading, "load", load)
    for _ in range(2):
        with pytest.raises(Invalid, match="waiting is excluded") as kept:
            compare_here(database, runs=[*two, waiting], baseline=waiting)
    assert (load.call_count, kept.value.errors[0].field) == (1, "baseline")
    report(database, waiting, evaluations=[reporting.evaluation_row(0, benchmark="easy")])
    assert compare_here(database, runs=[*two, waiting], baseline=waiting)["left_out"] == []


@pytest.mark.parametrize("stored", [json.dumps, dict], ids=["text", "object"])
def test_a_study_is_compared_by_its_reported_runs_with_its_own_baseline(
    client: TestClient, database: Database, stored: Callable[[dict[str, str]], Any]
) -> None:
    """Tuning runs have other seeds and budgets, and the baseline arm need not be GRPO."""
    made = add_group(database, "study", "study", study=stored({"baseline": "look-ahead"}))
    tuned = []
    for arm, rule, scores in (("plain", GRPO, RISING), ("look-ahead", GXPO, FASTER)):
        values = {"stage": "report", "arm": arm, "seed": 0}
        evaluated_run(database, config(rule, 0, arm), scores, group=made, values=values)
        short, values = {0: [0.0], 5: [0.5]}, {"stage": "ladder", "arm": arm, "seed": 100}
        tuned.append(evaluated_run(database, config(rule, 100, f"{arm} 100"), short, group=made, values=values))
    answer = compare(client, groups=made)
    seeds = {group["name"]: group["seeds"] for group in answer["groups"]}
    assert (seeds, answer["baseline"]) == ({"GRPO": [0], "GXPO K=5": [0]}, "GXPO K=5")
    # Of 20 passes, not of the tuning runs' 5.
    assert group(answer, "GRPO")["at_equal_passes"]["budget"] == 20
    assert [(run["run"], run["reason"]) for run in answer["left_out"]] == [
        (run, "tuning run of a study") for run in tuned
    ]
    assert compare(client, groups=made, baseline="GRPO")["baseline"] == "GRPO"
    # Named runs are compared whatever they are.
    assert [run["run"] for run in compare(client, groups=made, runs=tuned[0])["left_out"]] == tuned[1:]
    exported = client.get("/api/v1/export", params={"groups": made, "parts": "runs", "format": "jsonl"})
    assert len(exported.text.splitlines()) == 4


def test_a_study_whose_baseline_arm_is_not_compared_yet_says_so(client: TestClient, database: Database) -> None:
    made = add_group(database, "study", "study", study=json.dumps({"baseline": "look-ahead"}))
    for arm, rule in (("plain", GRPO), ("other", {"name": "sfpo"}), ("look-ahead", GXPO)):
        values = {"stage": "report", "arm": arm, "seed": 0}
        if rule is GXPO:
            add_run(database, config(rule, 0, arm), group=made, values=values)
        else:
            evaluated_run(database, config(rule, 0, arm), RISING, group=made, values=values)
    answer = compare(client, groups=made)
    line = "No run of look-ahead, the study's baseline arm, is compared."
    assert (answer["baseline"], answer["evidence"].splitlines()[-1]) == ("GRPO", line)
    alone = evaluated_run(database, config(GXPO, 1), RISING)
    assert line not in compare(client, runs=alone)["evidence"]


def test_a_run_without_evaluations_is_listed_and_the_rest_is_compared(
    client: TestClient, database: Database, two: tuple[str, str]
) -> None:
    waiting = add_run(database, config(GXPO, 7, "waiting"))
    other = evaluated_run(database, config(GXPO, 8), RISING, benchmarks=("hard",))
    sfpo = {"name": "sfpo", "k": 3}
    odd = [evaluated_run(database, config(sfpo, seed), {step: [0.5]}) for seed, step in ((0, 3), (1, 4))]
    answer = compare(client, runs=[*two, waiting, other, *odd], benchmark="easy")
    assert [configuration["name"] for configuration in answer["groups"]] == ["GRPO", "GXPO K=5"]
    reasons = {run["run"]: run["reason"] for run in answer["left_out"]}
    assert reasons.keys() == {waiting, other, *odd}, "seeds that share no step too"
    assert reasons[waiting] == "it has no evaluation (yet)"
    assert reasons[other] == "no evaluation of easy; it has hard"
    refused = client.get("/api/v1/compare", params={"runs": [waiting]})
    assert (refused.status_code, refused.json()["left_out"][0]["run"]) == (422, waiting)
    refused = client.get("/api/v1/compare", params={"runs": [*two, other]})
    assert (refused.status_code, "no common benchmark" in refused.json()["detail"]) == (422, True)


def test_steps_are_counted_from_the_end_of_a_warm_start(client: TestClient, database: Database) -> None:
    warm = evaluated_run(database, config(GRPO, warm_start={"steps": 10}), RISING)
    (own,) = compare(client, runs=warm)["groups"]
    assert own["runs"][0]["curve"]["steps"] == [0, 10]


def test_the_further_run_of_a_seed_counts_and_benchmarks_are_averaged(client: TestClient, database: Database) -> None:
    long = evaluated_run(database, config(GRPO), RISING, benchmarks=("easy", "hard"))
    short = evaluated_run(database, config(GRPO, name="retry"), {0: [0.0, 0.5]}, benchmarks=("easy", "hard"))
    answer = compare(client, runs=[short, long], smoothing=0.5)
    assert answer["benchmarks"] == ["easy", "hard"]
    assert [run["id"] for run in answer["groups"][0]["runs"]] == [long]
    assert answer["left_out"][0]["run"] == short
    assert long in answer["left_out"][0]["reason"]
    # .25, .375, .625 averaged with weight .5: .25, .3125, .46875; the curve itself stays as it is.
    curve = group(answer, "GRPO")["mean"]
    assert (curve["smoothed"], curve["accuracy"]) == ([0.25, 0.3125, 0.46875], [0.25, 0.375, 0.625])


def test_unequal_conditions_are_named_apart_from_the_compared_settings(client: TestClient, database: Database) -> None:
    first = evaluated_run(database, config(GRPO), RISING)
    hot = config(GXPO, rate=2e-5, rollout={"temperature": 0.7})
    second = evaluated_run(database, hot, FASTER, data_sha256="other")
    answer = compare(client, runs=[first, second])
    named = [difference["setting"] for difference in answer["differences"]]
    assert named == ["eval.easy.data_sha256", "rollout.temperature"]
    settings = {difference["setting"]: difference["values"] for difference in answer["settings"]}
    name, other = "GRPO lr 1e-05", "GXPO K=5 lr 2e-05"
    assert settings["rollout.temperature"] == {name: "1.0", other: "0.7"}
    assert settings["learner.rule.k"] == {name: None, other: "5"}
    assert settings["learner.optimizer.learning_rate"] == {name: "1e-05", other: "2e-05"}
    assert not {"name", "seed"} & settings.keys()


def test_without_z_scores_a_step_changes_nothing(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = Mock(wraps=service.compare)  # called for what is not taken from memory
    monkeypatch.setattr(service, "compare", compare)
    run = evaluated_run(database, config(GXPO), RISING, shutoff=12)
    launched = reporting.launch(database, run, 2)
    reporting.send(database, launched, reporting.body(1, 2))  # it runs from now on
    without = compare_here(database, runs=[run], gates=False)
    gate = without["groups"][0]["runs"][0]["gate"]
    assert (gate["steps"], gate["z"], gate["threshold"], gate["shutoff_step"]) == ([], [], 0.5, 12)
    compare_here(database, runs=[run])
    rows = [reporting.metric_row(21, **{"gate/z": 9.0, "gate/threshold": 0.5})]
    reporting.send(database, launched, reporting.body(2, 2, metrics=rows, offsets={"metrics": 20}))
    assert compare_here(database, runs=[run], gates=False) == without
    assert compare.call_count == 2
    assert compare_here(database, runs=[run])["groups"][0]["runs"][0]["gate"]["z"][-1] == 9.0
    assert compare.call_count == 3


def test_every_change_is_in_the_next_answer(client: TestClient, database: Database) -> None:
    group_id = add_group(database)
    run = add_run(database, config(GXPO), group=group_id)
    launched = reporting.launch(database, run)
    lines = dict.fromkeys(reporting.KINDS, 0)
    batches = iter(range(1, 100))

    def report(identity: dict[str, Any] | None = None, **parts: list[dict[str, Any]]) -> None:
        content = reporting.body(next(batches), identity=identity, offsets=dict(lines), **parts)
        reporting.send(database, launched, content)
        lines.update({kind: lines[kind] + len(rows) for kind, rows in parts.items()})

    def evaluation(step: int, attempt: int = 1, **values: Any) -> dict[str, Any]:
        return reporting.evaluation_row(step, attempt, **({"scores": {"pass@1": step / 100}} | values))

    changes: dict[str, Callable[[], object]] = {
        "an evaluation": lambda: report(evaluations=[evaluation(10)]),
        "the first value of a gate": lambda: report(metrics=[reporting.metric_row(11, **{"gate/z": 1.0})]),
        "a name": lambda: client.patch(f"/api/v1/runs/{run}", json={"name": "other"}),
        "a later attempt": lambda: report(metrics=[reporting.metric_row(10, 2, **{"gate/z": 2.0})]),
        "its evaluation": lambda: report(evaluations=[evaluation(10, 2, scores={"pass@1": 0.5})]),
        "a run of the group": lambda: evaluated_run(database, config(GRPO), RISING, group=group_id),
        "what it runs on": lambda: report(identity={"config": {}, "policy_sha256": "another"}),
    }
    report(evaluations=[evaluation(0)])
    before = compare(client, groups=group_id)
    for word, change in changes.items():
        change()
        answer = compare(client, groups=group_id)
        assert answer != before, word
        service._kept.clear()
        assert compare_here(database, groups=[group_id]) == answer, word
        before = answer


def test_a_comparison_whose_process_is_killed_is_refused_and_the_next_one_has_another(
    app: FastAPI, two: tuple[str, str], token_for: Callable[[str], str]
) -> None:
    headers = {"Authorization": f"Bearer {token_for('viewer')}"}
    with (
        HttpServer(app) as url,
        httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http,
        ThreadPoolExecutor(1) as pool,
    ):

        def ask(runs: int) -> httpx.Response:
            return http.get("/api/v1/compare", params={"runs": two[:runs]})

        before = set(psutil.Process().children())  # with what anyio 4.16 leaves of a service that ended at its start
        assert ask(2).status_code == 200
        (worker,) = set(psutil.Process().children()) - before
        assert "anyio.to_process" in worker.cmdline()
        worker.suspend()
        asked = pool.submit(ask, 1)
        until(lambda: app.state.heavy_gate.value == 0, "the comparison has its turn")
        worker.kill()
        refused = asked.result()
        assert (refused.status_code, refused.json()["title"]) == (503, "Unavailable")
        assert "the process that compares runs was killed" in refused.json()["detail"]
        assert ask(1).status_code == 200
    worker.wait(30)


@pytest.mark.each_database
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)  # SQLite has no server
def test_the_process_that_compares_waits_for_the_database_as_the_service_does(settings: ServiceSettings) -> None:
    patient = settings.model_copy(update={"database_timeout_s": 77.0})
    assert anyio.run(in_worker, Session.scalar, patient, text("SHOW statement_timeout")) == "77s"


REFUSED: list[tuple[dict[str, str], int, str]] = [
    ({}, 422, "is empty, and so is groups"),
    ({"runs": "r404"}, 404, "there is no run r404"),
    ({"groups": "g404"}, 404, "there is no group g404"),
    ({"runs": "../x"}, 422, "is not an id"),
    ({"runs": "r1\x00"}, 422, "NUL"),
    ({"runs": ",".join(f"r{number}" for number in range(201))}, 422, "at most 200"),
    ({"runs": "r1", "metric": "length_mean"}, 422, "metric"),
    ({"runs": "r1", "sampling_share": "nan"}, 422, "sampling_share"),
    ({"runs": "r1", "smoothing": "nan"}, 422, "smoothing"),
    ({"runs": "r1", "budgets": "soon"}, 422, "is not a budget"),
    ({"runs": "r1", "budgets": "inf"}, 422, "is not a budget"),
    ({"runs": "r1", "budgets": "hours:-1"}, 422, "is not a budget"),
    ({"runs": "r1", "budgets": "days:1"}, 422, "no such axis"),
    ({"runs": "r1", "budgets": ",".join(map(str, range(21)))}, 422, "more than 20"),
    ({"runs": "r1", "x": "days"}, 422, "x:"),
]


def test_what_cannot_be_compared_is_refused_with_the_reason(client: TestClient) -> None:
    for query, status, word in REFUSED:
        answer = client.get("/api/v1/compare", params=query)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), query
        assert word in answer.json()["detail"]


@pytest.fixture
def sweep(database: Database) -> str:
    """α × K × two seeds, a run without reports, and the control."""
    made = add_group(database)
    for k in (10, 3):
        for alpha in (0.5, 0.1):
            for seed in (0, 1):
                values = {"learner.rule.k": k, "learner.rule.alpha": alpha, "seed": seed}
                scores = {0: [0.1], 4: [k / 100 + alpha + seed / 10], 8: [0.2]}
                rule = GXPO | {"k": k, "alpha": alpha}
                evaluated_run(database, config(rule, seed), scores, passes=3, group=made, values=values)
    values = {"learner.rule.k": 20, "learner.rule.alpha": 0.1, "seed": 0}
    add_run(database, config(GXPO | {"k": 20}), group=made, values=values)
    control = {"learner.rule.name": "grpo", "learner.optimizer.learning_rate": 1e-4, "seed": 0}
    evaluated_run(database, config(GRPO, name="control"), RISING, group=made, values=control)
    return made


def test_a_sweep_as_a_heat_map(client: TestClient, sweep: str) -> None:
    answer = client.get(f"/api/v1/groups/{sweep}/heatmap", params={"show": "best"}).json()
    assert (answer["x"], answer["y"]) == ("learner.rule.k", "learner.rule.alpha")
    assert (answer["x_values"], answer["y_values"], answer["mixed"]) == ([3, 10, 20], [0.1, 0.5], [])
    cells = {(answer["x_values"][cell["x"]], answer["y_values"][cell["y"]]): cell for cell in answer["cells"]}
    # K = 10, α = .5: .1 + .5 and a tenth more for the other seed.
    assert cells[10, 0.5]["value"]["mean"] == pytest.approx(0.65)
    assert cells[10, 0.5]["value"]["num"] == len(cells[10, 0.5]["runs"]) == 2
    assert cells[20, 0.1]["value"] is None
    assert (20, 0.5) not in cells
    reasons = [(run["name"], run["reason"]) for run in answer["left_out"]]
    assert reasons == [("control", "it is a learning-rate control"), ("run", "it has no evaluation (yet)")]


def test_a_heat_map_leaves_out_controls_that_have_its_settings(client: TestClient, database: Database) -> None:
    made = add_group(database)
    rate = "learner.optimizer.learning_rate"
    for rule, extra in ((GXPO, {}), (GRPO, {"learner.rule.name": "grpo", rate: 3.5e-5})):
        for prompts, steps in itertools.product((4, 8), (10, 20)):
            values = {"rollout.prompts_per_step": prompts, "budget.steps": steps, **extra, "seed": 0}
            name = f"{rule['name']} {prompts} {steps}"
            evaluated_run(database, config(rule, name=name), FASTER, group=made, values=values)
    answer = client.get(f"/api/v1/groups/{made}/heatmap").json()
    assert {answer["x"], answer["y"], *answer["settings"]} == {"rollout.prompts_per_step", "budget.steps"}
    assert [cell["value"]["num"] for cell in answer["cells"]] == [1, 1, 1, 1]
    assert answer["mixed"] == []
    assert [(run["name"], run["reason"]) for run in answer["left_out"]] == [
        (f"grpo {prompts} {steps}", "it is a learning-rate control") for prompts in (4, 8) for steps in (10, 20)
    ]


def test_a_heat_map_of_a_sweep_of_rules_and_rates_has_the_rates_of_its_grid(
    client: TestClient, database: Database
) -> None:
    """Every run has a rule and a rate of the sweep, the controls too: at the rates × (αK + 1) = 3.5."""
    rate = "learner.optimizer.learning_rate"
    body = {"name": "s", "base": {"preset": "demo"}, "preset": "rules", "grid": {rate: [2e-5, 1e-5]}}
    made = client.post("/api/v1/sweeps", json=body).json()
    for run in made["runs"]:
        report(database, run["id"], evaluations=[reporting.evaluation_row(1)])
    answer = client.get(f"/api/v1/groups/{made['group']['id']}/heatmap").json()
    assert (answer["x"], answer["x_values"]) == (rate, [1e-5, 2e-5]), "the axes have the order of the request"
    assert (answer["y"], answer["y_values"]) == ("learner.rule.name", ["grpo", "sfpo", "gxpo"])
    assert [run["reason"] for run in answer["left_out"]] == ["it is a learning-rate control"] * 2


def test_the_axes_of_a_heat_map_are_the_first_settings_of_the_grid(client: TestClient) -> None:
    grid = {"learner.optimizer.learning_rate": [1e-5, 2e-5], "learner.rule.k": [3, 5], "learner.rule.alpha": [0.1, 1.0]}
    made = client.post("/api/v1/sweeps", json={"name": "s", "base": {"preset": "demo"}, "grid": grid}).json()
    answer = client.get(f"/api/v1/groups/{made['group']['id']}/heatmap").json()
    assert ([answer["x"], answer["y"]], answer["settings"]) == ([*grid][:2], [*grid])
    assert answer["mixed"] == ["learner.rule.alpha"]


def test_a_group_that_varies_too_little_has_no_heat_map(client: TestClient, database: Database, sweep: str) -> None:
    for group, query, status, word in (
        ("g404", {}, 404, "there is no group"),
        (add_group(database), {}, 422, "varies no setting"),
        (sweep, {"x": "learner.rule.gate"}, 422, "does not vary"),
        (sweep, {"x": "learner.rule.k", "y": "learner.rule.k"}, 422, "choose two settings"),
    ):
        answer = client.get(f"/api/v1/groups/{group}/heatmap", params=query)
        assert (answer.status_code, word in answer.json()["detail"]) == (status, True)


# The process that compares ends with the service, however that ends.


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_service(tmp_path: Path, ending: signal.Signals) -> None:
    home = tmp_path / "home"
    settings = ServiceSettings(home=home)
    prepare_local(settings)
    with closing(Database(settings.url)) as database:
        run = evaluated_run(database, config({"name": "grpo"}), {0: [0.5], 1: [1.0]})
    idle = ["-c", "import time; time.sleep(600)"]
    with ServiceProcesses({"GXPO_HOME": str(home)}, idle, tmp_path).running() as service:
        headers = {"Authorization": f"Bearer {(home / 'token').read_text().strip()}"}
        answer = httpx.get(f"{service.url}/api/v1/compare?runs={run}", headers=headers, timeout=60, trust_env=False)
        assert answer.status_code == 200
        running = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
        (api,) = [one for one in running if "serve" in one.cmdline()]
        (worker,) = api.children()
        assert "anyio.to_process" in worker.cmdline()
        api.send_signal(ending)
        api.wait(30)
        until(lambda: not is_alive(worker.pid), "the process that compares to end")


# `/runs/{id}/headline` of reported runs, on both databases.


def trained(database: Database, rule: dict[str, Any], *scores: float | str, seed: int = 0, **more: Any) -> str:
    """A score before the first step and after each of three passes with GXPO, one with GRPO."""
    passes = 3 if rule["name"] == "gxpo" else 1
    settings = {"rate": more.pop("rate", 1e-5), **more.pop("settings", {})}
    made = config(rule, seed, str(rule["name"]), **settings)
    steps: Any = {"reward/mean": 0.5} | more.pop("extra", {})
    run = add_run(database, made, **more)
    rows = []
    for step, score in enumerate(scores):
        own: Any = {"update/backward_passes_total": step * passes, **steps} if step else {}
        rows.append(reporting.metric_row(step, **own, **{"eval/average/pass@1": score}))
    report(database, run, metrics=rows)
    return run


def headline(client: TestClient, run: str) -> dict[str, Any]:
    content: dict[str, Any] = client.get(f"/api/v1/runs/{run}/headline").raise_for_status().json()
    assert content["text"] == " ".join(part["text"] for part in content["parts"])
    return content


def test_a_run_is_told_with_its_gate_its_scores_and_the_baseline_of_its_group(
    client: TestClient, database: Database
) -> None:
    group, gate = add_group(database), {"gate/z": 0.25, "gate/threshold": 0.5, "reward/no_signal": 1.0}
    values = {"seed": 0, "learner.rule.name": "grpo"}
    baseline = trained(database, GRPO, 0.1, 0.2, 0.3, 0.414, group=group, values=values)
    for strange in (
        {"rule": GRPO, "seed": 1, "values": {"seed": 1}},
        {"rule": GRPO, "values": None, "settings": {"data": {"source": "other"}}},
        {"rule": GRPO, "values": None, "settings": {"learner": {"rule": GRPO, "mini_batches": 4}}},
        {"rule": {"name": "sfpo"}, "values": {"seed": 0}},
    ):
        trained(database, strange.pop("rule"), 0.1, 0.9, 0.9, 0.9, group=group, **strange)
    trained(database, GRPO, 0.1, 0.9, 0.9, 0.9)
    run = trained(database, GXPO, 0.1, 0.4, "NaN", group=group, values={"seed": 0, "learner.rule.k": 5}, extra=gate)
    told = headline(client, run)
    assert [part["topic"] for part in told["parts"]] == ["state", "gate", "evaluation", "comparison", "signal"]
    state, *others = (part["text"] for part in told["parts"])
    assert state == "Running: step 2 of 40."
    assert others[:3] == [
        "The gate has not fired (largest z 0.25, τ 0.5).",
        "40.0% after 3 backward passes.",
        "This is 1.4 points below GRPO with the same seed.",
    ]
    assert told["parts"][3]["runs"] == [run, baseline]
    assert "comparison" not in [part["topic"] for part in headline(client, baseline)["parts"]]


def test_the_runs_of_a_demo_are_compared_with_each_other(client: TestClient, database: Database) -> None:
    """Rule, learning rate and schedule of evaluation differ, and each run's machine may."""
    group = add_group(database)
    evaluated = {"evaluation": {"every_steps": 15}, "placement": {"learner_cpus": 0.5}}
    trained(database, GRPO, 0.1, 0.2, 0.3, 0.3, group=group, rate=3e-5, settings=evaluated)
    run = trained(database, GXPO, 0.1, 0.4, group=group, settings={"evaluation": {"every_steps": 5}})
    assert headline(client, run)["parts"][-1]["text"] == "This is 10.0 points above GRPO with the same seed."


def test_a_control_with_another_learning_rate_is_a_baseline_too(client: TestClient, database: Database) -> None:
    group, rate = add_group(database), "learner.optimizer.learning_rate"
    # It went to one pass, GXPO was evaluated after three.
    trained(database, GRPO, 0.1, 0.3, group=group, values={"seed": 0})
    run = trained(database, GXPO, 0.1, 0.4, group=group, values={"seed": 0})
    assert headline(client, run)["parts"][-1]["topic"] == "evaluation"
    longer = trained(database, GRPO, 0.1, 0.2, 0.25, 0.3, group=group, values={"seed": 0, rate: 3e-5}, rate=3e-5)
    compared = headline(client, run)["parts"][-1]
    assert compared["text"] == "This is 10.0 points above GRPO lr 3e-05 with the same seed."
    assert compared["runs"] == [run, longer]
