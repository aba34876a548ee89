"""A training run on several reward components, one of them a class of one's own, as a user starts it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gxpo_trainer.report import read_metrics, read_samples
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
[learner.rule]
name = "grpo"
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
steps = 2
"""


def test_a_run_trains_on_the_weighted_sum_of_its_rewards(tmp_path: Path) -> None:
    (tmp_path / "own_rewards.py").write_text(OWN)
    (tmp_path / "run.toml").write_text(RUN)
    command = [sys.executable, "-m", "gxpo_trainer.cli", "train", "run.toml", "--out", "out"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    environment.pop(ALLOWLIST, None)
    refused = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "own_rewards:Brevity" in refused.stderr
    assert not (tmp_path / "out").exists()

    environment[ALLOWLIST] = "own_rewards:Brevity"
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [row["metrics"] for row in read_metrics(tmp_path / "out")]
    assert len(rows) == 2
    for row in rows:
        parts = [row[f"reward/{name}_mean"] for name in ("correctness", "format", "Brevity")]
        assert row["reward/mean"] == pytest.approx(parts[0] + 0.5 * parts[1] + 0.25 * parts[2], abs=1e-9)
        assert 0 < parts[2] < 1
    samples = read_samples(tmp_path / "out")
    assert samples
    for sample in samples:
        found = sample["components"]
        assert found["correctness"] == float(sample["verdict"] == "correct")
        expected = found["correctness"] + 0.5 * found["format"] + 0.25 * found["Brevity"]
        assert math.isclose(sample["reward"], expected, abs_tol=1e-9)
