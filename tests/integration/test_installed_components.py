"""A run with a rule, a loss, an advantage, a reward and a logger of an installed package, all on real engines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.walkthrough import ROOT, install

from gxpo_trainer.reporting.reading import read_identity, read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.long("custom components; the tutorial's rule is the other run")]
RUN = """
name = "workbench"
[model]
max_length = 256
[rollout]
prompts_per_step = 4
samples_per_prompt = 4
max_num_seqs = 16
[verifier]
workers = 1
[[verifier.rewards]]
name = "correctness"
[[verifier.rewards]]
name = "workbench.settings:BrevityReward"
longest = 48
[learner.rule]
name = "repeated"
[learner.loss]
surrogate = "workbench.settings:LinearLoss"
scale = 2.0
[learner.advantage]
name = "from_best"
offset = 0.25
[evaluation]
at_start = false
every_steps = 0
num_problems = 8
samples_per_prompt = 1
[budget]
steps = 2
"""


def test_a_run_of_components_of_an_installed_package(tmp_path: Path) -> None:
    install(ROOT / "tests" / "support" / "workbench", tmp_path / "site")
    (tmp_path / "run.toml").write_text(RUN)
    command = [sys.executable, "-m", "gxpo_trainer.cli", "train", "run.toml", "--out", "out"]
    ended = subprocess.run(
        [*command, "--set", 'logging.trackers=[{name="lines", every=2}]'],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    rows = [row["metrics"] for row in read_metrics(tmp_path / "out") if row["step"]]
    assert [row["update/backward_passes_total"] for row in rows] == [2, 4], "the rule: two steps a batch"
    assert all(0 < row["reward/BrevityReward"] < 1 for row in rows)
    for row in rows:
        # Rewards lie in [0, 2], so advantages in [−2, 0] plus the offset; the best of each group has the offset.
        assert 0 < row["policy/advantage_abs_mean"] < 2
        # The rule reports its second pass, where ρ is no longer 1 but near it: the loss is about −2 · mean(A).
        assert 0 < abs(row["policy/ratio_mean"] - 1.0) < 0.05
        assert 0 < abs(row["policy/loss"]) <= 2.1 * row["policy/advantage_abs_mean"]
        assert row["update/norm"] > 0
    learner = read_identity(tmp_path / "out")["config"]["learner"]
    assert (learner["loss"]["scale"], learner["advantage"]["offset"]) == (2.0, 0.25)
    first, *lines = (tmp_path / "out" / "lines.txt").read_text().splitlines()
    assert first == "workbench 0"
    # One line for the step and one for the evaluation after it; none for step 1.
    assert {line.partition(" ")[0] for line in lines} == {"2"}
