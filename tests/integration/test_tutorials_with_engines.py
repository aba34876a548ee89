"""The tutorials' commands that need an engine, with a model built on the spot: its score, a run with the tutorials'
reward and rule on 200 additions, and the exported model in transformers and vLLM."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny_families import save_own_model
from support.walkthrough import Reader, blocks, install_the_rule, titled

from gxpo_trainer.config.io import load_run
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


# docs/tutorials/train_in_a_notebook.ipynb, cell by cell in a process of its own.


NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorials" / "train_in_a_notebook.ipynb"


def test_the_notebook_trains_with_a_function_of_its_own(tmp_path: Path) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "notebook.py"
    shown = 'print(metrics["reward/brevity"].to_dict(), run.ended)\nprint(gxpo.Run("runs/notebook").evaluations())\n'
    script.write_text("\n".join("".join(cell["source"]) for cell in cells) + "\n" + shown, encoding="utf-8")
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = tmp_path / "runs" / "notebook"
    rows = read_metrics(run)
    expected = {row["step"]: row["metrics"]["reward/brevity"] for row in rows if "reward/brevity" in row["metrics"]}
    assert set(expected) == {1, 2}
    assert all(0 < value < 1 for value in expected.values())
    assert "steps" in ended.stdout
    for value in expected.values():
        assert str(value) in ended.stdout
    # The folder is that of `gxpo train`, which can go on with it.
    module, _, name = load_run(run / "config.toml").verifier.rewards[1].name.partition(":")
    assert name == "brevity"
    assert "def brevity" in (run / f"{module}.py").read_text()
    assert any((run / "checkpoints").iterdir())
