"""`gxpo train` as a user starts it: SFPO until its passes are spent, one reward component a class of one's own."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gxpo_trainer.records.reading import read_evaluations, read_events, read_metrics, read_samples
from gxpo_trainer.rewards.scoring import ALLOWLIST

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
[evaluation]
at_start = false
every_steps = 0
num_problems = 8
[budget]
backward_passes = 7
"""


def train(folder: Path, allowed: str | None) -> subprocess.CompletedProcess[str]:
    """What a user types in `folder`, with the environment a user gives it."""
    environment = {name: value for name, value in os.environ.items() if name != ALLOWLIST}
    environment["PYTHONPATH"] = str(folder)
    if allowed is not None:
        environment[ALLOWLIST] = allowed
    command = [sys.executable, "-m", "gxpo_trainer.cli", "train", "run.toml", "--out", "out"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds run.toml and the class that it names."""
    made = tmp_path_factory.mktemp("command")
    (made / "own_rewards.py").write_text(OWN)
    (made / "run.toml").write_text(RUN)
    return made


@pytest.fixture(scope="module")
def out(folder: Path) -> Path:
    """The run, trained to its end."""
    ended = train(folder, "own_rewards:Brevity")
    assert ended.returncode == 0, ended.stderr
    assert "ended by budget.backward_passes" in ended.stderr
    return folder / "out"


def test_a_class_that_is_not_on_the_list_is_refused_before_anything_starts(tmp_path: Path, folder: Path) -> None:
    for file in folder.glob("*.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    refused = train(tmp_path, None)
    assert refused.returncode == 2
    assert "own_rewards:Brevity" in refused.stderr
    assert not (tmp_path / "out").exists()


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
        parts = [row[f"reward/{name}_mean"] for name in ("correctness", "format", "Brevity")]
        assert row["reward/mean"] == pytest.approx(parts[0] + 0.5 * parts[1] + 0.25 * parts[2], abs=1e-9)
        assert 0 < parts[2] < 1
    samples = read_samples(out)
    assert samples
    for sample in samples:
        found = sample["components"]
        assert found["correctness"] == float(sample["verdict"] == "correct")
        expected = found["correctness"] + 0.5 * found["format"] + 0.25 * found["Brevity"]
        assert math.isclose(sample["reward"], expected, abs_tol=1e-9)
