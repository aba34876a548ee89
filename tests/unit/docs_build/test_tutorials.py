"""The tutorials as a reader does them, as far as no engine is needed."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.tiny_families import save_own_model
from support.walkthrough import ROOT, Reader, install_the_rule, titled

from gxpo_dashboard.views.run import PARTS
from gxpo_trainer.algo.batch import step_advantages
from gxpo_trainer.config.io import build
from gxpo_trainer.planner.architectures import FAMILIES, TRAINS
from gxpo_trainer.plugins import implementation

CHARTS = ROOT / "dashboard" / "gxpo_dashboard" / "charts"


@pytest.mark.parametrize("page", ["tutorials/train-your-model", "tutorials/write-a-reward", "environments"])
def test_the_commands_of_the_page_print_what_it_says(page: str, tmp_path: Path) -> None:
    if page == "tutorials/train-your-model":
        save_own_model(tmp_path / "my-model")
    Reader(tmp_path).follow(f"{page}.md")


def test_the_architectures_of_the_page_are_those_of_the_table() -> None:
    page = (ROOT / "docs" / "tutorials" / "train-your-model.md").read_text(encoding="utf-8")
    rows = [row.split("|") for row in page.partition("| `model_type` |")[2].splitlines()[2:] if row.startswith("|")]
    trained = {name: row[2].strip() == "yes" for row in rows[:6] for name in re.findall(r"`(\w+)`", row[1])}
    assert trained == {family: word == TRAINS for family, word in FAMILIES.items()}


def test_the_rule_of_the_tutorial_passes_its_own_test_and_is_known_to_the_commands(tmp_path: Path) -> None:
    reader = Reader(tmp_path, PYTHONPATH=str(install_the_rule(tmp_path)))
    reader.follow("tutorials/write-a-rule.md")
    planned = reader.run("bash", ".venv/bin/gxpo plan lookahead.toml --gpu cpu")
    assert re.search(r"Lookahead K=5 \*.* 40 +200 ", planned), planned


def test_examples_of_the_contracts_give_the_pages_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in titled("contracts.md").items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    loss, advantage = {"surrogate": "my_losses:SigmoidLoss"}, {"name": "my_advantages:LeaveOneOutAdvantage"}
    learner = build({"learner": {"loss": loss, "advantage": advantage}}).learner
    log_ratio = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    micro = SimpleNamespace(advantages=torch.ones(1, dtype=torch.float64))
    ratio, first_term = implementation(learner.loss)(learner.loss)(log_ratio, log_ratio, micro)
    first_term.sum().backward()
    assert log_ratio.grad is not None
    assert [each.item() for each in (ratio, first_term, log_ratio.grad)] == pytest.approx([1, -1, -1], rel=1e-12)
    (values,) = step_advantages([[1.0, None, 0.0, 0.0]], learner.loss, learner.advantage)
    assert values.tolist() == pytest.approx([1.0, math.nan, -0.5, -0.5], nan_ok=True)


def test_the_dashboard_has_every_part_and_chart_that_the_pages_name() -> None:
    pages = ["troubleshooting.md", "tutorials/train-your-model.md", "concepts/gate-and-budget.md"]
    text = "\n".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in pages)
    sources = "\n".join(path.read_text(encoding="utf-8") for path in CHARTS.glob("*.py"))
    titles = re.findall(r'"([A-Z][^"]+)"', sources)
    mentions = text.split("Run › ")[1:]
    assert len(mentions) > 20
    parts = [part if part == section else f"{part} › {section}" for part in PARTS for section in PARTS[part]]
    for mention in mentions:
        part = next((part for part in parts if mention.startswith(part)), None)
        assert part is not None, f"no part of the view: {mention[:40]}"
        if (chart := mention.removeprefix(part)).startswith(" › "):
            assert any(chart.removeprefix(" › ").startswith(title) for title in titles), f"no chart: {mention[:60]}"
