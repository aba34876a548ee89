"""The servers of docs/http-rewards.md, called by the component that they are written for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.reward_server import PATIENCE_S
from support.walkthrough import Reader, titled

from gxpo_trainer.config import HttpRewardConfig
from gxpo_trainer.config.io import load_run
from gxpo_trainer.grading.http_rewards import HttpAnswer, HttpReward

PAGE = "http-rewards.md"


@contextmanager
def served(folder: Path, name: str, *arguments: str) -> Iterator[str]:
    """Address of the page's server `name`, on a free port."""
    (folder / name).write_text(titled(PAGE)[name], encoding="utf-8")
    command = [sys.executable, str(folder / name), "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/"
    finally:
        process.kill()
        process.communicate()


def rewards(url: str, *responses: str, **settings: Any) -> list[HttpAnswer]:
    async def scenario() -> list[HttpAnswer]:
        component = HttpReward(HttpRewardConfig(url=url, deadline_s=PATIENCE_S, **settings))
        bodies = [{"problem": "2 + 2?", "gold": "4", "answer": text, "response": text} for text in responses]
        try:
            return await component.answers([{**body, "turns": [], "extra": {}} for body in bodies])
        finally:
            await component.close()

    return asyncio.run(scenario())


def test_the_judge_asks_its_model_and_its_mark_is_the_reward(tmp_path: Path) -> None:
    with served(tmp_path, "model.py") as model, served(tmp_path, "judge.py", model.rstrip("/") + "/v1") as judge:
        answers = rewards(judge, "4, because 2 and 2 make it", "4")
    assert [answer.value for answer in answers] == [0.9, 0.2]


def test_the_ranking_judge_compares_each_pair_in_both_orders(tmp_path: Path) -> None:
    with served(tmp_path, "model.py") as model, served(tmp_path, "ranking.py", model.rstrip("/") + "/v1") as judge:
        best, worst, other = rewards(judge, "4, because 2 and 2 make it", "4", "5", per="group")
        (alone,) = rewards(judge, "4", per="group")
    # The stand-in prefers "because", and else whichever comes first.
    assert [answer.value for answer in (best, worst, other)] == [1.0, 0.25, 0.25]
    assert alone.value == 0.5


def test_the_sandbox_rewards_programs_that_print_the_gold(tmp_path: Path) -> None:
    def program(code: str) -> str:
        return f"First:\n```python\nprint(4)\n```\nBetter:\n```python\n{code}\n```\n"

    with served(tmp_path, "sandbox.py", str(PATIENCE_S)) as sandbox:
        right, wrong, broken, none = rewards(
            sandbox, program("print(2 + 2)"), program("print(5)"), program("print(4)\n1/0"), "print(4)"
        )
    assert [answer.value for answer in (right, wrong, broken, none)] == [1.0, 0.0, 0.0, 0.0]


def test_the_sandbox_ends_a_program_that_does_not_end(tmp_path: Path) -> None:
    with served(tmp_path, "sandbox.py", "1") as sandbox:
        (answer,) = rewards(sandbox, "```python\nwhile True: pass\n```")
    assert answer.value == 0.0


def test_the_run_file_of_the_page_is_valid_and_names_both_servers(tmp_path: Path) -> None:
    Reader(tmp_path).follow(PAGE)
    config = load_run(tmp_path / "judged.toml")
    assert [reward.label for reward in config.verifier.rewards] == ["correctness", "judge", "sandbox"]
