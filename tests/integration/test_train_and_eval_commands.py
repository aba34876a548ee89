"""`gxpo train` as a user starts it: SFPO until its passes are spent, with reward components of every kind: built in, a
class of one's own, a server. `gxpo eval` on the real sampler: a named benchmark from a local copy, a file of one's own.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.data_files import write
from support.reward_server import RewardServer, reply

from gxpo_trainer.cli import main
from gxpo_trainer.grading.rewards import URLS
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.reporting.reading import read_evaluations, read_events, read_metrics, read_samples
from gxpo_trainer.runtime.placement_group import RunPlacementGroup

pytestmark = pytest.mark.engine

OWN = '''
class Brevity:
    """1 for an empty response, less by a fortieth for each token."""

    def __call__(self, sample):
        return 1 - sample.num_tokens / 40
'''
RUN = """
name = "rewards"
[model]
max_length = 192
[data]
num_problems = 256
[rollout]
prompts_per_step = 8
samples_per_prompt = 4
max_new_tokens = 40
max_num_seqs = 64
[learner.optimizer]
learning_rate = 1e-5
[learner.rule]
name = "sfpo"
k = 2
gate.mode = "never"
[[verifier.rewards]]
name = "correctness"
[[verifier.rewards]]
name = "format"
weight = 0.5
[[verifier.rewards]]
name = "own_rewards:Brevity"
weight = 0.25
[[verifier.rewards]]
name = "http"
label = "judge"
weight = 0.125
url = "URL"
[evaluation]
at_start = false
every_steps = 0
num_problems = 8
[budget]
backward_passes = 7
"""


@pytest.fixture(scope="module")
def judge() -> Iterator[RewardServer]:
    """1 for a response with an even number of characters, else 0."""

    def answer(number: int, body: dict[str, Any], connection: socket.socket) -> None:
        reply(connection, json.dumps({"reward": 1 - len(body["response"]) % 2}))

    with RewardServer(answer) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, judge: RewardServer) -> Path:
    """Holds run.toml and the class that it names."""
    made = tmp_path_factory.mktemp("command")
    (made / "own_rewards.py").write_text(OWN)
    (made / "run.toml").write_text(RUN.replace("URL", judge.url))
    return made


@pytest.fixture(scope="module")
def out(folder: Path, judge: RewardServer) -> Path:
    """The run, trained to its end."""
    environment = {name: value for name, value in os.environ.items() if name != "GXPO_REWARD_ALLOWLIST"}
    environment |= {"PYTHONPATH": str(folder), URLS: judge.url}
    command = [sys.executable, "-m", "gxpo_trainer.cli", "train", "run.toml", "--out", "out"]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "ended by budget.backward_passes" in ended.stderr
    return folder / "out"


def test_sfpo_trains_until_its_passes_are_spent(out: Path) -> None:
    rows = read_metrics(out)
    # Three passes a step: the third step is the one that reaches seven.
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["metrics"]["update/backward_passes"] for row in rows] == [3, 3, 3]
    assert rows[-1]["metrics"]["update/backward_passes_total"] == 9
    assert all(row["metrics"]["update/weights_changed_fraction"] > 0.5 for row in rows[1:])
    assert len(read_evaluations(out)) == 1
    assert read_events(out)[-1]["kind"] == "finished"


def test_a_run_trains_on_the_weighted_sum_of_its_rewards(out: Path) -> None:
    for row in (row["metrics"] for row in read_metrics(out)):
        parts = [row[f"reward/{name}"] for name in ("correctness", "format", "Brevity", "judge")]
        expected = parts[0] + 0.5 * parts[1] + 0.25 * parts[2] + 0.125 * parts[3]
        assert row["reward/mean"] == pytest.approx(expected, abs=1e-9)
        assert 0 < parts[2] < 1
    samples = read_samples(out)
    assert samples
    for sample in samples:
        parts = sample["components"]
        assert parts["correctness"] == float(sample["verdict"] == "correct")
        assert parts["judge"] == 1 - len(sample["response"]) % 2
        expected = parts["correctness"] + 0.5 * parts["format"] + 0.25 * parts["Brevity"] + 0.125 * parts["judge"]
        assert math.isclose(sample["reward"], expected, abs_tol=1e-9)


def test_the_cost_of_rewards_over_http_is_the_servers_work(out: Path, judge: RewardServer) -> None:
    rows = [row["metrics"] for row in read_metrics(out)]
    calls = sum(row["reward/http_calls"] for row in rows)
    assert calls == len(judge.requests)
    # Every sample of 3 steps, 8 prompts, 4 samples is either one request or a cache hit.
    assert calls + sum(row["reward/http_cache_hits"] for row in rows) == 3 * 8 * 4
    assert all(row["reward/http_s"] > 0 for row in rows)


PROBLEM = "Anna has {} apples. She gets {} more. How many does Anna have now?"


@pytest.mark.long("evaluation is a part of every run")
def test_scores_name_everything_that_makes_them_comparable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ray_on_loopback: None
) -> None:
    reserved = []
    create = RunPlacementGroup.create
    monkeypatch.setattr(RunPlacementGroup, "create", lambda self, b: (reserved.append(b), create(self, b)))
    sums = [(12, 5), (7, 8), (20, 13)]
    rows = [{"problem": PROBLEM.format(a, b), "answer": f"{a + b}.0"} for a, b in sums]
    write(tmp_path / "amc23.jsonl", *rows)
    # Every number that the policy generates is within this tolerance.
    own = write(tmp_path / "own.jsonl", *({**row, "verify": {"tolerance": 1000}} for row in rows))
    out = tmp_path / "out.jsonl"
    arguments = ["eval", "--model", STARTER_FOLDER, "--benchmark", f"amc23,{own}", "--samples", 8]
    arguments += ["--data-root", tmp_path, "--template", "plain", "--max-new-tokens", 48, "--out", out]
    assert main([str(part) for part in arguments]) == 0
    assert [bundles.resources for bundles in reserved] == [({"CPU": 1.0},)], "one engine and the verifier"
    amc, mine = (json.loads(line) for line in out.read_text().splitlines())
    assert [amc["benchmark"], mine["benchmark"]] == ["amc23", "own"]
    for record in (amc, mine):
        assert record["template"] == "{problem}"
        assert record["sampling"]["temperature"] == 1.0
        assert set(record["versions"]) == {"gxpo", "math-verify"}
        assert all(len(record[name]) == 64 for name in ("data_sha256", "policy_sha256"))
        assert [len(record[name]) for name in ("problem_ids", "per_problem")] == [3, 3]
        assert {f"pass@{k}" for k in range(1, 9)} | {"maj@8"} <= set(record["scores"])
    assert amc["data_sha256"] != mine["data_sha256"]
    # The starter boxes nearly every answer; the grader accepts them all only under the tolerance.
    assert mine["scores"]["pass@1"] > 0.9 > amc["scores"]["pass@1"]
    assert "pass@8" in capsys.readouterr().out
