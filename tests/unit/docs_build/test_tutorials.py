"""The tutorials as a reader does them, as far as no engine is needed."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.reward_server import ask, isolated
from support.tiny_families import save_own_model
from support.walkthrough import Reader, blocks, install_the_rule, titled

from gxpo_trainer.algo.batch import step_advantages
from gxpo_trainer.config.io import build, load_run
from gxpo_trainer.plugins import implementation


@pytest.mark.parametrize("page", ["tutorials/train-your-model", "tutorials/write-a-reward", "environments"])
def test_the_commands_of_the_page_print_what_it_says(page: str, tmp_path: Path) -> None:
    if page == "tutorials/train-your-model":
        save_own_model(tmp_path / "my-model")
    Reader(tmp_path).follow(f"{page}.md")


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
    assert [each.item() for each in (ratio, first_term, log_ratio.grad)] == pytest.approx([1, -1, -1], rel=1e-12)
    (values,) = step_advantages([[1.0, None, 0.0, 0.0]], learner.loss, learner.advantage)
    assert values.tolist() == pytest.approx([1.0, math.nan, -0.5, -0.5], nan_ok=True)


# The servers of docs/http-rewards.md, called by the component that they are written for, and docs/sandbox.md.


PAGE = "http-rewards.md"


@contextmanager
def served(folder: Path, name: str, *arguments: str) -> Iterator[str]:
    """Address of the page's server `name`, on a free port."""
    (folder / name).write_text(titled(PAGE)[name], encoding="utf-8")
    command = [sys.executable, str(folder / name), "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/"
    finally:
        process.kill()
        process.communicate()


def rewards(url: str, *responses: str, **settings: Any) -> list[float | None]:
    problem = {"problem": "2 + 2?", "gold": "4", "turns": [], "extra": {}}
    bodies = [{**problem, "answer": text, "response": text} for text in responses]
    return [answer.value for answer in ask(url, *bodies, **settings)]


def test_the_judge_asks_its_model_and_its_mark_is_the_reward(tmp_path: Path) -> None:
    with served(tmp_path, "model.py") as model, served(tmp_path, "judge.py", model.rstrip("/") + "/v1") as judge:
        assert rewards(judge, "4, because 2 and 2 make it", "4") == [0.9, 0.2]


def test_the_ranking_judge_compares_each_pair_in_both_orders(tmp_path: Path) -> None:
    with served(tmp_path, "model.py") as model, served(tmp_path, "ranking.py", model.rstrip("/") + "/v1") as judge:
        # The stand-in prefers "because", and else whichever comes first.
        assert rewards(judge, "4, because 2 and 2 make it", "4", "5", per="group") == [1.0, 0.25, 0.25]
        assert rewards(judge, "4", per="group") == [0.5]


def test_the_run_file_of_the_page_is_valid_and_its_data_have_what_its_servers_need(tmp_path: Path) -> None:
    Reader(tmp_path).follow(PAGE)
    config = load_run(tmp_path / "judged.toml")
    # The embedded problems have no tests, so the sandbox would refuse every response.
    assert config.data.source == "word_problems"
    assert [reward.label for reward in config.verifier.rewards] == ["correctness", "judge"]
    (started,) = (block.text for block in blocks(PAGE) if ".venv/bin/gxpo train judged.toml" in block.text)
    assert f"GXPO_REWARD_URLS={config.verifier.http_rewards[0].url}\n" in started


@pytest.mark.parametrize(
    ("page", "name", "models"),
    [
        ("sft.md", "sft.toml", ["my-model"]),
        ("sandbox.md", "functions.toml", ["my-model"]),
        ("distillation.md", "distil.toml", ["my-small-model", "my-large-model"]),
        ("environments.md", "guessing.toml", []),
    ],
)
def test_a_run_file_of_a_page_is_planned_and_leaves_room_for_a_real_response(
    page: str, name: str, models: list[str], tmp_path: Path
) -> None:
    for model in models:
        save_own_model(tmp_path / model)
    (tmp_path / "problems.jsonl").write_text('{"problem": "1 + 1?"}\n')
    reader = Reader(tmp_path)
    for title, text in titled(page).items():
        reader.write(title, text)
    reader.run("bash", f".venv/bin/gxpo config --check {name}\n.venv/bin/gxpo plan {name}")
    config = load_run(tmp_path / name)
    if page == "sft.md":  # as `gxpo sft` would run it
        assert (config.rollout.source, config.learner.rule.name) == ("dataset", "grpo")
    elif models:
        assert config.rollout.max_new_tokens == 1024


def test_the_problems_of_the_sandboxs_page_have_tests_that_a_solution_passes(tmp_path: Path) -> None:
    save_own_model(tmp_path / "my-model")
    Reader(tmp_path).follow("sandbox.md")
    config = load_run(tmp_path / "functions.toml")
    assert [(reward.label, reward.name) for reward in config.verifier.rewards] == [("tests", "http")]
    function, program = (json.loads(line) for line in (tmp_path / "functions.jsonl").read_text().splitlines())
    sandbox = isolated()
    codes = ("def add(a, b): return a + b", "print(sum(map(int, input().split())))")
    for row, right, wrong in ((function, *codes), (program, *codes[::-1])):
        assert sandbox.grade({"response": right, "extra": row})["reward"] == 1.0
        assert sandbox.grade({"response": wrong, "extra": row})["reward"] == 0.0
