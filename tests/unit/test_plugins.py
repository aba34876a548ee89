"""Custom components: by entry point and by class path, their errors, and what a service's list allows.

The package is tests/support/workbench; tests/unit/rules/test_installed_rule.py has what the product shows of its rule.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from gxpo_services.api.errors import Invalid
from gxpo_services.runs.configs import checked, config_schema
from gxpo_services.settings import ServiceSettings
from gxpo_trainer import cli, plugins
from gxpo_trainer.algo.batch import step_advantages
from gxpo_trainer.config import LossConfig, RunConfig
from gxpo_trainer.config.components import CHOICES
from gxpo_trainer.config.io import build, load_run, to_toml
from gxpo_trainer.config.rules import RULES
from gxpo_trainer.environments.contract import Problem
from gxpo_trainer.environments.host import check_environment
from gxpo_trainer.environments.loading import load_environment
from gxpo_trainer.errors import ConfigError, TrainingError
from gxpo_trainer.grading.rewards import Scorer
from gxpo_trainer.reporting.identity import run_identity
from gxpo_trainer.reporting.reporter import RunReporter
from gxpo_trainer.reporting.trackers import Trackers
from gxpo_trainer.rollout.verification import check_rewards
from gxpo_trainer.types import Verdict

pytestmark = pytest.mark.usefixtures("workbench")
CLASS = "workbench.settings:"
COMPONENTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rule": ("repeated", "RepeatedRule", {"repeats": 3}),
    "loss": ("linear", "LinearLoss", {"scale": 2.0}),
    "advantage": ("from_best", "FromBestAdvantage", {"offset": 0.5}),
}
"""Part of the learner → name, settings class and a setting."""
both_ways = pytest.mark.parametrize("by_path", [False, True], ids=["entry-point", "class-path"])


def learner(by_path: bool) -> RunConfig:
    """A config with a rule, a loss and an advantage of the package."""
    sections = {}
    for part, (name, settings, values) in COMPONENTS.items():
        key = "surrogate" if part == "loss" else "name"
        sections[part] = {key: CLASS + settings if by_path else name, **values}
    return build({"learner": sections})


# ---- each kind is used ----------------------------------------------------------------------------------------


@both_ways
def test_settings_are_checked_hashed_and_written_as_ours_are(by_path: bool, tmp_path: Path) -> None:
    config = learner(by_path)
    assert [type(getattr(config.learner, part)).__name__ for part in COMPONENTS] == [
        settings for _, settings, _ in COMPONENTS.values()
    ]
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    assert load_run(file) == config
    assert load_run(file, ["learner.loss.scale=3"]).sha256() != config.sha256()
    with pytest.raises(ConfigError, match=r"learner\.loss\.scale = 0\.0: must be above 0"):
        load_run(file, ["learner.loss.scale=0.0"])
    mistyped = r"learner\.loss\.scales is not a setting; did you mean learner\.loss\.scale\?"
    with pytest.raises(ConfigError, match=mistyped):
        load_run(file, ["learner.loss.scales=2"])
    unknown = r"settings of learner\.rule are not known: it cannot be imported .*PYTHONPATH"
    with pytest.raises(ConfigError, match=unknown):
        load_run(file, ["learner.rule.name=no_such_package:Rule", "learner.rule.speed=2"])
    # Of another choice only what all have is kept.
    other = load_run(file, ["learner.loss.surrogate=gspo", "learner.loss.clip_low=0.1"]).learner.loss
    assert other == LossConfig(surrogate="gspo", clip_low=0.1)


@both_ways
def test_a_config_reaches_other_processes(by_path: bool, workbench: Path) -> None:
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer).model_dump_json())"
    ended = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(learner(by_path)), capture_output=True)
    assert ended.returncode == 0, ended.stderr.decode()
    assert RunConfig.model_validate_json(ended.stdout) == learner(by_path)


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ([[0.0]], r"of the shapes \[\(1,\)\] for groups of the shapes \[\(2,\)\]; return one array of each shape"),
        ([], r"of the shapes \[\] for groups"),
        ([[math.nan, 0.0]], "an advantage that is not finite for a sample with a reward"),
    ],
)
def test_an_advantage_that_breaks_its_contract_is_named(returned: list[list[float]], complaint: str) -> None:
    settings = learner(False).learner
    made = mock.Mock(return_value=lambda groups: [np.array(values) for values in returned])
    with (
        mock.patch("gxpo_trainer.algo.batch.implementation", return_value=made),
        pytest.raises(TrainingError, match=rf'learner\.advantage\.name = "from_best" returned .*{complaint}'),
    ):
        step_advantages([[1.0, 0.0]], settings.loss, settings.advantage)


@both_ways
def test_a_reward_gets_its_settings_in_the_workers(by_path: bool) -> None:
    name = CLASS + "BrevityReward" if by_path else "brevity"
    rewards = [{"name": name, "weight": 2.0, "longest": 8}, {"name": "workbench.parts:Plain"}]
    config = build({"verifier": {"workers": 1, "rewards": rewards}}).verifier
    check_rewards(config)
    scorer = Scorer.load([reward.model_dump(mode="json") for reward in config.worker_rewards], os.environ)
    context = {"problem": "?", "num_tokens": 6, "truncated": False, "extra": {}}
    result = scorer.score("5", "5", Verdict("correct", "5", 0.0), context)
    label = "BrevityReward" if by_path else "brevity"
    assert result == {"components": {label: 0.25, "Plain": 0.5}, "score": 1.0}  # 2 (1 − 6/8) + ½


@both_ways
def test_an_environment_gets_its_settings_in_its_process(by_path: bool) -> None:
    name = CLASS + "EchoEnvironment" if by_path else "echo"
    config = build({"environment": {"name": name, "prefix": "Again: "}, "model": {"max_length": 4096}}).environment
    assert load_environment(config.model_dump(mode="json"))().step("hello").observation == "Again: hello"
    check_environment(config, Problem("p1", "Say something", "", {}), seed=1)


@both_ways
def test_a_logger_receives_the_rows_of_a_run(by_path: bool, tmp_path: Path) -> None:
    name = CLASS + "LinesLogger" if by_path else "lines"
    config = build({"name": "r", "seed": 7, "logging": {"trackers": [{"name": name, "every": 2}]}})
    with RunReporter(tmp_path) as reporter:
        reporter.write_identity(run_identity(config))
        with Trackers(tmp_path, config.logging, print, finish_s=60.0):
            for step in (1, 2, 3, 4):
                reporter.log_metrics(step, {"reward/mean": 0.5})
    assert (tmp_path / "lines.txt").read_text() == "r 7\n2 ['reward/mean']\n4 ['reward/mean']\n"


@pytest.mark.parametrize(
    ("tracker", "complaint"),
    [
        ("line", r'name = "line": must be one of "tensorboard", .*"lines", .*; did you mean "lines"\?'),
        ({"name": "lines", "every": 0}, r"every = 0: must be at least 1"),
        ({"name": "lines", "often": 1}, r"often = 1: unknown setting"),
        ({"name": "tensorboard", "every": 1}, r"every = 1: unknown setting"),
    ],
)
def test_bad_loggers_are_named(tracker: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build({"logging": {"trackers": [tracker]}})


# ---- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("repaeted", r'must be one of "grpo", .*, or a class as package\.module:Class; did you mean "repeated"\?'),
        ("broken", r"cannot be imported \(RuntimeError: no licence on this machine\); fix .*broken\.py, line 3$"),
        ("workbench.nothing:X", r"cannot be imported \(ModuleNotFoundError: .*\); install its package, or add"),
        (CLASS + "RepeatdRule", r'module workbench\.settings has no RepeatdRule; did you mean "RepeatedRule"\?'),
        (CLASS + "LinearLoss", r"is no settings class for gxpo\.rules; name a subclass of .*RuleSettings with"),
        ("workbench.parts:Repeated", r"is no settings class for gxpo\.rules"),
        (
            CLASS + "NoSuchPartRule",
            r'implementation = "workbench\.parts:Repeatde" of the settings class NoSuchPartRule does not exist: module '
            r'workbench\.parts has no Repeatde; did you mean "Repeated"\?',
        ),
        (CLASS + "UnfinishedRule", r"cannot be used: it has no method step; define step\(self, learner, \*, last\)$"),
        (CLASS + "BareRule", r'has no implementation; set BareRule\.implementation to "module:Class"'),
    ],
)
def test_messages_name_the_fix(name: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(f'[learner.rule]\nname = "{name}"\n')
    assert cli.main(["config", "--check", str(tmp_path / "run.toml")]) == 2
    printed = capsys.readouterr().err
    head, line = printed.splitlines()
    assert head.endswith("run.toml cannot be used:")
    before, _, after = line.partition(": ")
    assert before == f'  learner.rule.name = "{name}"'
    assert re.search(complaint, after), printed


def test_a_syntax_error_is_found_in_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "unparsed.py").write_text("import math\n\ndef f(:\n")
    (tmp_path / "outer.py").write_text("import unparsed\n")
    (tmp_path / "evaluating.py").write_text("eval('f(:')\n")
    for module, place in {"unparsed": "unparsed.py, line 3", "outer": "unparsed.py, line 3"}.items():
        with pytest.raises(ConfigError, match=rf"\(SyntaxError: .*; fix {tmp_path}/{place}$"):
            plugins.import_class(f"{module}:X")
    with pytest.raises(ConfigError, match=rf"; fix {tmp_path}/evaluating\.py, line 1$"):
        plugins.import_class("evaluating:X")


async def asynchronous(self: object, action: str) -> None: ...


@pytest.mark.parametrize(
    ("kind", "name", "members", "problem"),
    [
        ("environments", "Echo", {"step": asynchronous},
         "its method step is a coroutine; define step(self, action) without async"),
        ("environments", "Echo", {"step": lambda self: None},
         "its method step does not take these arguments (too many positional arguments)"),
        ("environments", "Echo", {"step": staticmethod(lambda action: None)}, None),
        ("environments", "Echo", {"__init__": lambda self, a, b: None},
         "its method __init__ does not take these arguments (missing a required argument: 'b'); define __init__(self, "
         "settings)"),
        ("rules", "Repeated", {"step": lambda self, learner: None},
         "its method step does not take these arguments (got an unexpected keyword argument 'last'); define step(self, "
         "learner, *, last)"),
        ("losses", "FromBest", {"__init__": lambda self, settings: None},
         "its method __call__ does not take these arguments (too many positional arguments); define __call__(self, "
         "log_ratio, logprobs, micro)"),
        ("losses", "Echo", {}, "it has no method __call__; define __call__(self, log_ratio, logprobs, micro)"),
        ("advantages", "FromBest", {"__init__": lambda self, settings: None},
         "its method __init__ does not take these arguments (too many positional arguments); define __init__(self, "
         "settings, loss)"),
        ("loggers", "Lines", {"__init__": lambda self, settings, out_dir: None},
         "its method __init__ does not take these arguments (got an unexpected keyword argument 'run_name')"),
    ],
)  # fmt: skip
def test_a_class_that_lacks_its_contract_is_told_before_a_run(
    kind: plugins.Kind, name: str, members: dict[str, Any], problem: str | None
) -> None:
    from workbench import parts

    mine = type("Mine", (getattr(parts, name),), members)
    told = plugins.class_problem(kind, mine, has_settings=True)
    assert told == problem or (problem is not None and told is not None and told.startswith(problem))
    assert plugins.class_problem("rules", 3, has_settings=True) == (
        "it is not a class; name one as package.module:Class"
    )


def test_every_built_in_and_installed_class_has_its_contract() -> None:
    from workbench import parts

    classes: list[tuple[plugins.Kind, Any]] = [
        ("rules", parts.Repeated), ("losses", parts.Linear), ("advantages", parts.FromBest),
        ("environments", parts.Echo), ("loggers", parts.Lines),
    ]  # fmt: skip
    for choice in CHOICES.values():
        own = [settings for settings in choice.known() if settings.__module__.startswith("gxpo_trainer.")]
        paths = [settings.implementation for settings in own if hasattr(settings, "implementation")]
        classes += [(choice.kind, plugins.import_class(path)) for path in paths]
    assert len(classes) > 5 + len(RULES)
    for kind, candidate in classes:
        assert plugins.class_problem(kind, candidate, has_settings=True) is None, candidate


@pytest.mark.parametrize(("name", "owners"), [("gxpo", "gxpo and a:B"), ("twice", "a:B and c:D")])
def test_a_name_of_two_components_is_an_error(name: str, owners: str) -> None:
    entries = tuple(EntryPoint(name, value, "gxpo.rules") for value in ("a:B", "c:D") if value in owners)
    known = {**plugins._registered(), "rules": {name: entries}}
    several = rf'rule\.name = "{name}": is the name of several .*, in {owners}; uninstall'
    with mock.patch.object(plugins, "_registered", return_value=known):
        with pytest.raises(ConfigError, match=several):
            build({"learner": {"rule": {"name": name}}})
        assert build({"learner": {"rule": {"name": "grpo"}}}).learner.rule.name == "grpo"


def test_a_class_that_is_elsewhere_is_left_to_the_machine_that_runs_it(tmp_path: Path) -> None:
    rewards = [{"name": "elsewhere.rewards:Brevity"}]
    assert build({"verifier": {"rewards": rewards}}).verifier.rewards[0].weight == 1.0
    with pytest.raises(ConfigError, match=r"rewards\[0\]\.name = .*No module named 'elsewhere'"):
        build({"verifier": {"rewards": [{**rewards[0], "longest": 3}]}})
    (tmp_path / "run.toml").write_text('[[verifier.rewards]]\nname = "elsewhere.rewards:Brevity"\n')
    assert load_run(tmp_path / "run.toml").verifier.rewards[0].weight == 1.0
    with pytest.raises(ConfigError, match=r'rewards\[0\]\.name = "elsewhere.rewards:Brevity": cannot be imported'):
        load_run(tmp_path / "run.toml", runs_here=True)


# ---- the administrator's list ---------------------------------------------------------------------------------


def test_a_list_allows_exact_names() -> None:
    path = CLASS + "RepeatedRule"
    allowed = {
        ("", "repeated"): False, ("a:B, repeated", "repeated"): True, ("*", "repeated"): True, ("*", path): False,
        ("repeated", path): False, (path, path): True,
    }  # fmt: skip
    answers = {case: plugins.is_allowed("rules", case[1], {plugins.ALLOWLIST: case[0]}) for case in allowed}
    assert answers == allowed
    assert plugins.is_allowed("rules", "repeated", {}), "without a list"
    # The older lists are for their kind.
    assert plugins.allowed("rewards", {"GXPO_REWARD_ALLOWLIST": "a:B", plugins.ALLOWLIST: "c:D"}) == {"a:B", "c:D"}
    assert plugins.allowed("rules", {"GXPO_REWARD_ALLOWLIST": "a:B", plugins.ALLOWLIST: "c:D"}) == {"c:D"}
    assert plugins.allowed("rules", {"GXPO_REWARD_ALLOWLIST": "a:B"}) is None


SECTIONS: dict[str, Any] = {
    "learner.rule.name": {"learner": {"rule": {"name": "repeated"}}},
    "learner.loss.surrogate": {"learner": {"loss": {"surrogate": CLASS + "LinearLoss"}}},
    "learner.advantage.name": {"learner": {"advantage": {"name": "from_best"}}},
    "verifier.rewards[0].name": {"verifier": {"rewards": [{"name": "brevity"}]}},
    "environment.name": {"environment": {"name": "echo"}},
}


@pytest.mark.parametrize("setting", SECTIONS)
def test_a_service_refuses_the_unlisted_and_imports_nothing(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServiceSettings(allowed_plugins=("other",))
    for name, value in server.allowlists.items():  # as in a process of the service
        monkeypatch.setenv(name, value)
    with pytest.raises(Invalid) as refused:
        checked(SECTIONS[setting], server)
    (error,) = refused.value.errors
    assert error.field == f"config.{setting}"
    assert error.message.startswith("is not allowed on this server; choose from ")
    assert error.message.endswith(" other, which its administrator can extend by GXPO_ALLOWED_PLUGINS")
    config_schema()
    assert "workbench" not in sys.modules


def test_starting_a_service_imports_no_component(workbench: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from gxpo_services.app import create_app; from gxpo_services.runs.configs import config_schema\n"
        "create_app(); config_schema(); print('workbench' in sys.modules)"
    )
    environment = {**os.environ, "GXPO_HOME": str(tmp_path)}
    printed = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert printed.stdout == "False\n", printed.stderr
