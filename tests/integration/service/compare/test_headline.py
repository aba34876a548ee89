"""`/runs/{id}/headline` of reported runs, on both databases."""

from __future__ import annotations

from typing import Any

from fastapi.testclient import TestClient
from support import reporting
from support.reported_runs import add_group, add_run, config, report

from gxpo_services.db.database import Database

GRPO: dict[str, Any] = {"name": "grpo"}
GXPO: dict[str, Any] = {"name": "gxpo", "k": 5}


def trained(database: Database, rule: dict[str, Any], *scores: float | str, seed: int = 0, **more: Any) -> str:
    """A run that takes a step of three passes with GXPO, and one with GRPO; a score before the first step and after
    each."""
    passes = 3 if rule["name"] == "gxpo" else 1
    made = config(rule, seed, str(rule["name"]), rate=more.pop("rate", 1e-5))
    extra = more.pop("extra", {})
    run = add_run(database, made, **more)
    rows = [reporting.metric_row(0, **{"eval/average/pass@1": scores[0]})]
    for step, score in enumerate(scores[1:], start=1):
        names = {"reward/mean": 0.5, "update/backward_passes_total": step * passes, "eval/average/pass@1": score}
        rows.append(reporting.metric_row(step, **names, **extra))
    report(database, run, metrics=rows)
    return run


def headline(client: TestClient, run: str) -> dict[str, Any]:
    answer = client.get(f"/api/v1/runs/{run}/headline")
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
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
        {"rule": GRPO, "values": {"seed": 0, "data.source": "other"}},
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


def test_a_control_with_another_learning_rate_is_a_baseline_too(client: TestClient, database: Database) -> None:
    group, rate = add_group(database), "learner.optimizer.learning_rate"
    trained(database, GRPO, 0.1, 0.2, group=group, values={"seed": 0})
    control = trained(database, GRPO, 0.1, 0.3, group=group, values={"seed": 0, rate: 2e-5}, rate=2e-5)
    run = trained(database, GXPO, 0.1, 0.4, group=group, values={"seed": 0})
    compared = headline(client, run)["parts"][-1]
    # GRPO went to one pass, GXPO was evaluated after three.
    assert (compared["topic"], control not in compared["runs"]) == ("evaluation", True)
    longer = trained(database, GRPO, 0.1, 0.2, 0.25, 0.3, group=group, values={"seed": 0, rate: 3e-5}, rate=3e-5)
    compared = headline(client, run)["parts"][-1]
    assert compared["text"] == "This is 10.0 points above GRPO lr 3e-05 with the same seed."
    assert compared["runs"] == [run, longer]


def test_a_queued_run_names_the_runs_that_hold_resources(client: TestClient, database: Database) -> None:
    waiting = add_run(database, config(GXPO, name="waiting"))
    assert headline(client, waiting)["text"] == "Queued at position 1."
    holder = trained(database, GRPO, 0.1, 0.2)
    told = headline(client, waiting)
    assert told["text"] == "Queued at position 1; resources are held by grpo."
    assert told["parts"][0]["runs"] == [holder]
    assert client.post(f"/api/v1/runs/{waiting}/cancel").status_code == 200
    assert headline(client, waiting)["text"] == "Cancelled before the first step."
    assert client.get("/api/v1/runs/r404/headline").status_code == 404
