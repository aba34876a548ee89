"""The generated pages are what the code generates now, and their sources describe everything."""

from __future__ import annotations

import re
from pathlib import Path

from docs_build import commands, generated, metrics
from docs_build.metrics import SECTIONS, undescribed
from gxpo_trainer.cli import build_parser

ROOT = Path(__file__).parents[3]
TRAINER = ROOT / "trainer" / "gxpo_trainer"
GROUPS = "update|gate|grad|gxpo|diagnostics|policy|importance|reward|verify|rollout|time|system|eval"


def test_a_page_that_differs_is_stale(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for path, text in generated.pages().items():
        (tmp_path / path).write_text(text + ("!" if path == "docs/metrics.md" else ""), encoding="utf-8")
    assert generated.stale(tmp_path) == ["docs/metrics.md"]


def test_every_metric_in_the_trainers_code_is_described() -> None:
    code = [path.read_text(encoding="utf-8") for path in TRAINER.rglob("*.py")]
    named = {name for text in code for name in re.findall(rf'"((?:{GROUPS})/[a-z0-9_@/]*[a-z0-9_])"', text)}
    assert len(named) > 60
    assert not undescribed(named)


def test_every_described_metric_occurs_in_the_trainers_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in TRAINER.rglob("*.py"))
    names = [name for section in SECTIONS for row in section.metrics for name in row]
    plain = [re.split(r"[@<…]", name)[0].rstrip("/").rpartition("/")[2] for name in names]
    parts = {part.removesuffix("_fraction").removesuffix("_mean").removesuffix("_s") for part in plain}
    assert [part for part in sorted(parts) if part not in code] == []


def test_a_name_is_described_as_a_whole_only() -> None:
    known = {"policy/pass12/loss", "eval/mine.jsonl/pass@4/ci_low", "reward/Brevity", "eval/math500/full/pass@1"}
    assert undescribed(known) == set()
    assert undescribed({"gate/z2", "my/gate/z", "policy/passes"}) == {"gate/z2", "my/gate/z", "policy/passes"}


def test_a_bar_in_a_meaning_does_not_end_the_cell() -> None:
    (row,) = [line for line in metrics.render_page().splitlines() if line.startswith("| `rollout/logprob_gap_mean`")]
    assert r"\|log π_learner − log π_sampler\|" in row


def test_every_command_and_argument_has_a_help_text() -> None:
    bare = re.findall(r"^\| `[^|]*` \|  \|$", commands.render_page(build_parser()), re.MULTILINE)
    assert {line.split("`")[1].split()[0] for line in bare} <= {"--name", "--notes", "--title"}
