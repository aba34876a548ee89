"""The tutorials' commands that need an engine, with a model built on the spot: its score, a run with the tutorials'
reward and rule on 200 additions, and the exported model in transformers and vLLM."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.tiny_families import save_own_model
from support.walkthrough import Reader, blocks, install_the_rule, titled

from gxpo_trainer.reporting.reading import read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.long("tutorials with engines")]
PAGE = "tutorials/train-your-model.md"
RULE = "--set learner.rule.name=lookahead --set learner.rule.k=2"


def additions(first: int, count: int) -> str:
    pairs = [(number, 7 * number % 90) for number in range(first, first + count)]
    return "".join(json.dumps({"problem": f"{a} + {b}", "answer": str(a + b)}) + "\n" for a, b in pairs)


def test_a_model_of_ones_own_is_scored_trained_with_the_tutorials_reward_and_rule_and_exported(tmp_path: Path) -> None:
    site = install_the_rule(tmp_path)
    reward = titled("tutorials/write-a-reward.md")
    reader = Reader(tmp_path, PYTHONPATH=f"{tmp_path}:{site}")
    for title, text in titled(PAGE).items():
        reader.write(title, text)
    save_own_model(tmp_path / "my-model")
    reader.write("problems.jsonl", additions(1, 200))
    reader.write("held_out.jsonl", additions(300, 4))
    reader.write("my_rewards.py", reward["my_rewards.py"])
    components = reward["brief.toml"].partition("\n\n")[2].partition("[budget]")[0]
    reader.write("mine.toml", titled(PAGE)["mine.toml"] + "\n" + components)
    ability, train, export, load, score = [block for block in blocks(PAGE) if block.needs == "engine"]
    (of_reward,) = [block.text for block in blocks("tutorials/write-a-reward.md") if block.needs == "engine"]
    assert of_reward.splitlines()[1:] == ["PYTHONPATH=$PWD .venv/bin/gxpo train brief.toml"]
    assert train.text.rstrip().endswith("--set budget.steps=2")
    assert "held_out" in reader.run("bash", ability.text)
    printed = reader.run("bash", f"{train.text.rstrip()} {RULE}")
    assert re.search(r"mine: step 2/2  reward 0\.\d+  length \d+  truncated \d+%", printed), printed
    rows = [row["metrics"] for row in read_metrics(tmp_path / "runs" / "smoke") if row["step"]]
    assert [row["update/backward_passes_total"] for row in rows] == [2, 4]
    assert all(0 < row["reward/Brevity"] < 1 for row in rows)
    assert all(row["update/norm"] > 0 for row in rows), "the reward of the components gives a gradient"
    assert "step 2" in reader.run("bash", export.text)
    assert "Tom has 3 bags" in reader.run(load.language, load.text)
    assert "held_out" in reader.run("bash", f"{score.text.rstrip()} --max-new-tokens 40"), "vLLM loads the folder"
