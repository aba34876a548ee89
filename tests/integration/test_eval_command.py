"""`gxpo eval` on the real sampler: a named benchmark from a local copy, a file of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.data_files import write

from gxpo_trainer.cli import main
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.runtime.placement_group import RunPlacementGroup

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_on_loopback")]
PROBLEM = "Anna has {} apples. She gets {} more. How many does Anna have now?"


def test_scores_name_everything_that_makes_them_comparable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
    table = capsys.readouterr().out
    assert "pass@8" in table
