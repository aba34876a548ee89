"""gxpo.Trainer builds the config of a run file and stores the reward functions that are defined where it is called."""

from __future__ import annotations

import functools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import FunctionType
from typing import Any

import datasets
import pandas
import pytest
import torch

import gxpo
from gxpo_trainer.config.io import build
from gxpo_trainer.data.prompts import load_prompts
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.grading.rewards import Scorer
from gxpo_trainer.types import Verdict

RECORDING = Path(__file__).parents[2] / "browser" / "recordings" / "demo"
LONGEST = 8
VOWEL = re.compile("[aeiou]", re.IGNORECASE)
OBJECT = object()
SCALE = 4.0


def scaled(by: float) -> Callable[[Callable[[gxpo.RewardInput], float]], Callable[[gxpo.RewardInput], float]]:
    def decorate(function: Callable[[gxpo.RewardInput], float]) -> Callable[[gxpo.RewardInput], float]:
        return functools.wraps(function)(lambda sample: by * function(sample))

    return decorate


def here(function: Callable[[gxpo.RewardInput], float]) -> Callable[[gxpo.RewardInput], float]:
    """The function as if a notebook had defined it."""
    assert isinstance(function, FunctionType)
    function.__module__ = "__main__"
    return function


def vowels(sample: gxpo.RewardInput) -> float:
    """Uses a module, a class of another module, a constant, a pattern, and a name inside a comprehension only."""
    share = Fraction(sum(bool(VOWEL.match(letter)) for letter in sample.response), LONGEST)
    return math.floor(100 * share) / 100


def with_an_object(sample: gxpo.RewardInput) -> float:
    return float(OBJECT is None)


@scaled(SCALE)
def decorated(sample: gxpo.RewardInput, share: float = 1 / LONGEST, *, most: float = SCALE) -> float:
    """Uses names of its module in its decorator and its defaults, and one as the name of a variable."""
    return min(most, share) * len([OBJECT for OBJECT in sample.response if OBJECT in "aeiou"])


def plain(sample: gxpo.RewardInput) -> float:
    return 0.25


def score(config: gxpo.RunConfig) -> Any:
    rewards = [reward.model_dump(mode="json") for reward in config.verifier.worker_rewards]
    context = {"problem": "?", "num_tokens": 1, "truncated": False, "extra": {}}
    return Scorer.load(rewards, {}).score("5", "Audi", Verdict("wrong", "4", 0.0), context)


def test_the_config_is_that_of_a_run_file() -> None:
    trainer = gxpo.Trainer(
        "m",
        data="problems.jsonl",
        rewards=[{"weight": 1.0}, {"name": "format", "weight": 0.5}],
        rule=gxpo.rules.GXPO(k=7),
        name="my run",
        settings={"rollout.max_new_tokens": 64, "learner.rule.gate.threshold": 2.0},
    )
    rule = {"name": "gxpo", "k": 7, "gate": {"threshold": 2.0}}
    rewards = [{"name": "correctness"}, {"name": "format", "weight": 0.5}]
    assert trainer.config == build(
        {"name": "my run", "model": {"path": "m"}, "data": {"source": "problems.jsonl"}, "learner": {"rule": rule},
         "verifier": {"rewards": rewards}, "rollout": {"max_new_tokens": 64}}
    )  # fmt: skip
    assert trainer.out_dir == Path("runs/my-run")
    with pytest.raises(ConfigError, match=r"gxpo.Trainer cannot be used:\n  rollout.max_new_tokns = 3: unknown"):
        gxpo.Trainer(settings={"rollout.max_new_tokns": 3})


def test_a_section_of_settings_is_added_to_the_arguments() -> None:
    """Not in their place: the run would train on other data, with another K."""
    section = {"shuffle": False}
    settings = {"data": section, "data.num_problems": 9, "learner": {"rule": {"alpha": 0.25}}}
    config = gxpo.Trainer(data="problems.jsonl", rule=gxpo.rules.GXPO(k=7), settings=settings).config
    assert (config.data.source, config.data.shuffle, config.data.num_problems) == ("problems.jsonl", False, 9)
    assert (config.learner.rule.k, config.learner.rule.alpha) == (7, 0.25)
    assert section == {"shuffle": False}


ROWS = [{"problem": "What is ½ of 4?", "answer": 2}, {"problem": "What is 1 + 2?", "answer": 3, "hard": True}]


@pytest.mark.parametrize("kind", ["list", "iterator", "frame", "dataset"])
def test_rows_in_memory_are_stored_with_the_run_and_read_as_a_file(kind: str, tmp_path: Path) -> None:
    kinds: dict[str, Callable[[Any], Any]] = {
        "list": list,
        "iterator": iter,
        "frame": lambda rows: pandas.DataFrame(rows).convert_dtypes(),
        "dataset": datasets.Dataset.from_list,
    }
    trainer = gxpo.Trainer(data=kinds[kind](ROWS), out_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists(), "nothing is written before it trains"
    source = Path(trainer.config.data.source)
    assert re.fullmatch(r"rows_[0-9a-f]{8}\.jsonl", source.name)
    trainer.store()
    first, second = load_prompts(trainer.config.data, 0).prompts
    assert (first.text, first.gold, second.gold) == ("What is ½ of 4?", "2", "3")


def test_one_reward_or_rule_may_be_given_alone() -> None:
    for one, name in (("format", "format"), ({"name": "format"}, "format"), (plain, f"{__name__}:plain")):
        config = gxpo.Trainer(rewards=one, rule="sfpo").config
        assert [reward.name for reward in config.verifier.worker_rewards] == [name]
        assert config.learner.rule.name == "sfpo"


def test_a_folder_that_does_not_exist_is_no_run_without_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no run folder '.*mistyped'"):
        gxpo.Run(tmp_path / "mistyped")


def test_functions_of_a_notebook_are_stored_with_the_run_and_those_of_modules_imported(tmp_path: Path) -> None:
    rewards: list[Any] = [{"name": here(vowels), "weight": 2.0}, plain, here(decorated)]
    trainer, again = (gxpo.Trainer("starter", rewards=rewards, out_dir=tmp_path / "run") for _ in range(2))
    stored, imported, _ = [reward.name for reward in trainer.config.verifier.rewards]
    assert re.fullmatch(r"rewards_[0-9a-f]{8}:vowels", stored)
    assert imported == f"{__name__}:plain"
    assert trainer.config.sha256() == again.config.sha256(), "equal text is an equal config, which resumes"
    with trainer._importable():
        # Three of four letters, of eight: ⅜. Two of them are small: 4 · 2 / 8.
        components = {"vowels": 0.37, "plain": 0.25, "decorated": 1.0}
        assert score(trainer.config) == {"components": components, "score": 1.99}
        code = f"import {stored.partition(':')[0]}, {__name__}"
        assert subprocess.run([sys.executable, "-c", code], cwd="/", check=False).returncode == 0
    assert str(tmp_path / "run") not in sys.path


def with_an_object_as_default(sample: gxpo.RewardInput, default: object = OBJECT) -> float:
    return float(default is None)


exec("def typed(sample): return 0.0")  # noqa: S102  as in an interpreter, where no file has the text


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (with_an_object, "reward with_an_object uses OBJECT"),
        (with_an_object_as_default, "reward with_an_object_as_default uses OBJECT"),
        (lambda sample: 0.0, "<lambda>: define it with def"),
        (typed, "typed: define it with def"),  # type: ignore[name-defined]  # noqa: F821
    ],
)
def test_what_other_processes_cannot_have_is_refused(function: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        gxpo.Trainer(rewards=[here(function)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"settings": {"name.x": 1}}, r'name = {"x": 1}: must be text'),
        ({"rewards": ["format"], "settings": {"verifier.rewards.0.weight": 1}}, "verifier.rewards = .* must be a list"),
        ({"rewards": [functools.partial(plain)]}, r"rewards\[0\].name = .* must be text"),
        ({"model": torch.nn.Linear(1, 1)}, "model is a Linear; save it with save_pretrained, and give its folder"),
        ({"data": 3}, "data is of the type int; give a file, a hub name, or rows as dicts"),
        ({"data": [{"problem": "a"}, "b"]}, "data: row 1 is of the type str; rows are dicts"),
        ({"data": [{"problem": {1, 2}}]}, "data: row 0 cannot be written as JSON: .*set"),
        ({"data": [{"problem": "a", "answer": math.nan}]}, "data: row 0 cannot be written as JSON: Out of range"),
        ({"data": [{"problem": "\ud800"}]}, "data: row 0 cannot be written as JSON: .*surrogates not allowed"),
        ({"data": []}, "data has no rows"),
        ({"rule": "gxp"}, 'learner.rule.name = "gxp": must be one of'),
    ],
)
def test_what_is_no_section_or_no_reward_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        gxpo.Trainer(**arguments)


def test_a_runs_tables_have_what_its_files_have() -> None:
    run = gxpo.Run(str(RECORDING))
    metrics = run.metrics()
    rows = [json.loads(line) for line in (RECORDING / "metrics.jsonl").read_text().splitlines()]
    assert metrics.index.tolist() == sorted({row["step"] for row in rows})
    assert metrics["reward/mean"].dropna().tolist() == [
        row["metrics"]["reward/mean"] for row in rows if "reward/mean" in row["metrics"]
    ]
    first = json.loads((RECORDING / "evaluations.jsonl").read_text().splitlines()[0])
    assert run.evaluations().loc[(first["step"], first["benchmark"]), "pass@1"] == first["scores"]["pass@1"]
    assert len(run.samples()) == len((RECORDING / "samples.jsonl").read_text().splitlines())
