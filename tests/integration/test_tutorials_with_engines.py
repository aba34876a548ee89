"""The tutorials' commands that need an engine, in one run: its data, its reward, its rule, and the exported model in
transformers and vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.walkthrough import Reader, blocks, install_the_rule, titled

from gxpo_trainer.reporting.reading import read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.long("tutorials with engines")]
PAGE = "tutorials/train-your-model.md"
RULE = "--set learner.rule.name=lookahead --set learner.rule.k=2"


def test_a_run_with_the_tutorials_data_reward_and_rule_trains_and_is_exported(tmp_path: Path) -> None:
    site = install_the_rule(tmp_path)
    reward = titled("tutorials/write-a-reward.md")
    reader = Reader(tmp_path, PYTHONPATH=f"{tmp_path}:{site}")
    for title, text in titled(PAGE).items():
        reader.write(title, text)
    reader.write("my_rewards.py", reward["my_rewards.py"])
    components = reward["brief.toml"].partition("\n\n")[2].partition("[budget]")[0]
    reader.write("mine.toml", titled(PAGE)["mine.toml"] + "\n" + components)
    train, export, load, score = [block for block in blocks(PAGE) if block.needs == "engine"]
    (of_reward,) = [block.text for block in blocks("tutorials/write-a-reward.md") if block.needs == "engine"]
    assert of_reward.splitlines()[1:] == ["PYTHONPATH=$PWD .venv/bin/gxpo train brief.toml"]
    assert train.text.rstrip().endswith("--set budget.steps=2")
    reader.run("bash", f"{train.text.rstrip()} {RULE}")
    rows = [row["metrics"] for row in read_metrics(tmp_path / "runs" / "smoke") if row["step"]]
    assert [row["update/backward_passes_total"] for row in rows] == [2, 4]
    assert all(0 < row["reward/Brevity"] < 1 for row in rows)
    assert all(row["update/norm"] > 0 for row in rows), "the reward of the components gives a gradient"
    assert "step 2" in reader.run("bash", export.text)
    assert "Tom has 3 bags" in reader.run(load.language, load.text)
    assert "held_out" in reader.run("bash", f"{score.text.rstrip()} --max-new-tokens 40"), "vLLM loads the folder"
