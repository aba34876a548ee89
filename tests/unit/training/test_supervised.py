"""Runs that learn completions or from a teacher: their rows, what counts in a warm start, settings that contradict."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
from support.checkpointed import save_checkpoint
from support.data_files import write
from transformers import AutoTokenizer

from gxpo_trainer import cli
from gxpo_trainer.algo.batch import StepBatch, supervised_batch
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import build, load_preset
from gxpo_trainer.errors import CheckpointError, ConfigError, DataError, Diverged, WeightSyncMismatch
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.learner.rank import StepResult
from gxpo_trainer.rollout.sources import Rollouts
from gxpo_trainer.rollout.timeline import Timeline
from gxpo_trainer.runtime.progress import ProgressWatch
from gxpo_trainer.training import run
from gxpo_trainer.training.controller import Controller
from gxpo_trainer.training.prepare import prepare
from gxpo_trainer.types import Group, Prompt, Sample, ScoredGroup, Verdict

ROWS = [
    {"problem": "3+4", "completion": "7"},
    {"problem": "5+6", "completion": "5+6=11", "answer": "11"},
    {"problem": "7+8", "completion": "15 " * 200},
]


def settings(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> RunConfig:
    body = {
        "model": {"max_length": 128},
        "data": {"source": str(write(folder / "rows.jsonl", *rows)), "template": "plain", "shuffle": False},
        "rollout": {"source": "dataset", "prompts_per_step": 2},
        "evaluation": {"benchmarks": []},
        "placement": {"device": "cpu"},
    }
    return build({**body, **changes})


def test_rows_need_no_answer_and_end_with_the_end_token(tmp_path: Path) -> None:
    prepared = prepare(settings(tmp_path, ROWS), tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(STARTER_FOLDER)
    assert [tokenizer.decode(ids) for ids in prepared.problems.rows.completion_ids] == ["7<|end|>", "5+6=11<|end|>"]
    assert [prompt.gold for prompt in prepared.problems.rows.prompts] == ["", "11"]
    assert prepared.problems.data.num_left_out == {"model.max_length": 1}
    assert prepared.placement.config.placement.samplers == 0, "no benchmark, no engine"
    assert prepared.placement.bundles().resources == ({"CPU": 1.0},)
    assert prepared.config.placement.samplers == 1, "the run file stays valid"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS[2:], r"model\.max_length = 128 excludes all rows"),
        ([{"problem": "3+4", "completion": "7", "answer": "\\frac{"}], "cannot be parsed"),
    ],
)
def test_rows_that_cannot_be_learned_are_refused(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare(settings(tmp_path, rows), tmp_path / "run")


def test_the_embedded_task_has_its_worked_answers_for_a_warm_start_and_its_golds_for_the_run(tmp_path: Path) -> None:
    settings = ["data.num_problems=64", "data.guess_share=0", "model.path=starter", "placement.device=cpu"]
    prepared = prepare(load_preset("sft-demo", settings), tmp_path / "run")
    for prompt in prepared.problems.rows.prompts:
        assert (prompt.completion or "").endswith(f"={prompt.gold}, so \\boxed{{{prompt.gold}}}")
    assert all(prompt.completion is None for prompt in prepared.problems.prompts.prompts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learner": {"loss": {"kl_beta": 0.1}}}, r"learner\.loss\.kl_beta has no meaning .*; set it to 0"),
        ({"learner": {"loss": {"zero_variance": "drop"}}}, r'zero_variance has no meaning .*; set it to "keep"'),
        ({"teacher": None}, "belong together; set both or neither"),
        ({"rollout": {}}, "belong together"),
        ({"teacher": {"path": "starter-tools"}}, r"'starter-tools' has another vocabulary .* of the same family"),
        ({"teacher": {"path": "/no/such/model"}}, r"teacher\.path = '/no/such/model': the folder does not exist"),
    ],
)
def test_a_teacher_that_cannot_work_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    body = {"rollout": {"source": "teacher"}, "teacher": {"path": "starter"}, "placement": {"device": "cpu"}}
    with pytest.raises(ConfigError, match=message):
        prepare(build({**body, **changes}), tmp_path / "run")


def test_a_run_resumes_with_the_teacher_that_it_began_with(tmp_path: Path) -> None:
    folder = shutil.copytree(STARTER_FOLDER, tmp_path / "taught")
    body = {"rollout": {"source": "teacher"}, "teacher": {"path": str(folder)}, "placement": {"device": "cpu"}}
    save_checkpoint(prepare(build(body), tmp_path / "run"))
    prepare(build(body), tmp_path / "run", resume=True)
    weights = folder / "model.safetensors"
    *kept, last = weights.read_bytes()
    weights.write_bytes(bytes([*kept, last ^ 1]))
    with pytest.raises(CheckpointError, match=r"the content of teacher\.path has changed since"):
        prepare(build(body), tmp_path / "run", resume=True)


@pytest.mark.parametrize(("benchmarks", "started"), [([], "learner"), (["word_problems"], "sampler and learner")])
def test_the_console_names_what_starts(
    benchmarks: list[str], started: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = "_reserve cluster_resources check_memory build_runtime Controller next_attempt repeated_passes Trackers"
    for name in (*steps.split(), "_write_identity", "_record_end"):
        monkeypatch.setattr(run, name, MagicMock())
    monkeypatch.setattr(run, "connect_ray", lambda placement: False)
    said: list[str] = []
    config = settings(tmp_path, ROWS, evaluation={"benchmarks": benchmarks})
    prepared = Mock(config=config, checkpoint=None, skipped=())
    run._run(prepared, Mock(terminated=False), Mock(), Mock(message=said.append))
    assert said == [f"starting {started}"]


@pytest.mark.parametrize(("rule", "trained"), [("", "grpo"), ('[learner.rule]\nname = "gxpo"\nk = 7\n', "gxpo")])
def test_sft_is_plain_without_a_rule(rule: str, trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[budget]\nsteps = 3\n{rule}")
    configs: list[RunConfig] = []
    monkeypatch.setattr(run, "train_in_launch", lambda config, *_, **__: configs.append(config) or "steps")
    assert cli.main(["sft", str(file), "--out", str(tmp_path / "out"), "--set", "seed=4"]) == 0
    (config,) = configs
    assert (config.rollout.source, config.learner.rule.name, config.seed) == ("dataset", trained, 4)


def test_a_warm_start_is_counted_and_reported_apart(tmp_path: Path) -> None:
    body: dict[str, Any] = {"learner": {"optimizer": {"learning_rate": 0.1, "schedule": "linear"}}}
    body |= {"warm_start": {"steps": 2, "learning_rate": 0.5, "schedule": "linear"}, "budget": {"steps": 2}}
    body |= {"evaluation": {"every_steps": 1}, "checkpoint": {"every_steps": 0}}
    config = RunConfig.model_validate(body)

    def batch(step: int) -> StepBatch:
        return supervised_batch([np.ones(3, np.int32)], [np.ones(4, np.int32)], 48)

    rows: dict[int, dict[str, float]] = {}
    evaluated: list[int] = []
    calls: list[tuple[str, float]] = []

    def train_step(batches: Any, rate: float, *, stage: str, diagnose: bool = False) -> StepResult:
        """One pass a supervised step, three a step of the run."""
        calls.append((stage, rate))
        metrics = {"policy/loss": 2.0, "policy/pass1/loss": 2.0, "policy/entropy": 1.0, "grad/norm_g0": 3.0}
        return StepResult(metrics, 1 if stage == "warm_start" else 3, 0, 0.0, 0.0, True, None, 0.5, 0.0, 7)

    source = Mock(batch=batch, sync=lambda _: None, state_dict=dict)
    timelines: list[tuple[int, list[tuple[str, str]]]] = []
    timeline, group = Timeline(itertools.count(0.5).__next__), Mock(watch=ProgressWatch())
    pool = Mock(timeline=timeline, group=group, engines=Mock(all=[0]))
    learners = Mock(train_step=train_step)
    runtime: Any = Mock(config=config, learners=learners, pool=pool, rollouts=source)
    reporter: Any = Mock(
        out_dir=tmp_path,
        log_timeline=lambda step, _, spans: timelines.append((step, [span[:2] for span in spans])),
        log_metrics=lambda step, metrics: rows.setdefault(step, {}).update(metrics),
    )
    evaluator: Any = Mock(run=lambda *_, version, **__: (evaluated.append(version), ([], {}))[1])
    controller = Controller(runtime, evaluator, reporter, Mock(), Mock())
    for _ in range(4):
        assert controller.counters.reached(config) is None
        controller.step()
    assert controller.counters.reached(config) == "steps"
    # Linear: the whole rate at the first of two steps, half at the second; in either phase.
    assert calls == [("warm_start", 0.5), ("warm_start", 0.25), ("first", 0.1), ("run", 0.05)]
    assert evaluated == [2, 3, 4], "the start of the run, not what comes before"
    assert [step for step, spans in timelines if spans == [("evaluation", "evaluating")]] == [2, 3, 4]
    warm, after = rows[2], rows[4]
    own = {name for name in warm if not name.startswith(("warm_start/", "system/"))}
    assert own == {"update/backward_passes_total", "time/training_s", "time/elapsed_s", "time/evaluate_s"}
    assert (warm["warm_start/loss"], warm["warm_start/tokens"], warm["warm_start/learning_rate"]) == (2.0, 4.0, 0.25)
    assert (warm["warm_start/backward_passes_total"], warm["update/backward_passes_total"]) == (2, 0)
    assert (after["warm_start/backward_passes_total"], after["update/backward_passes_total"]) == (2, 6)
    assert warm["time/training_s"] == 0 < after["time/training_s"]
    assert after["rollout/tokens_total"] == 8
    assert controller.counters.flat == 0, "completions have no rewards that could lack a signal"


@pytest.mark.parametrize(("warm", "section"), [(3, r"warm_start"), (0, r"learner\.optimizer")])
def test_three_steps_without_a_finite_gradient_end_a_run_as_diverged(warm: int, section: str, tmp_path: Path) -> None:
    """Not as a mismatch of the weights, although the gap to the sampler is not finite either."""
    body = {"checkpoint": {"every_steps": 0}, "evaluation": {"every_steps": 0}}
    config = RunConfig.model_validate(body | {"warm_start": {"steps": warm} if warm else None})
    ids, logprobs = np.ones(3, np.int32), np.zeros(3, np.float32)
    samples, nan = (Sample("", ids, logprobs, "stop"),) * 2, float("nan")

    def batch(step: int) -> StepBatch | Rollouts:
        if warm:
            return supervised_batch([ids], [ids], 48)
        group = Group(Prompt("p", "", "1"), ids, samples, step - 1)
        scored = ScoredGroup(group, (Verdict("correct", "1", 0.0), Verdict("wrong", "2", 0.0)))
        return Rollouts([scored], 6, 0.0, 0.0, 0, 0.0)

    def controller(*, finite: bool, gap: float | None) -> Controller:
        result = StepResult({"policy/loss": nan}, 1, 0, gap, gap, finite, None, 0.5, 0.0, 7)
        source = Mock(batch=batch, sync=lambda _: None, sync_due=False)
        pool = Mock(timeline=Timeline(), group=Mock(watch=ProgressWatch()), engines=Mock(all=[0]))
        learners = Mock(train_step=lambda *_, **__: result)
        runtime: Any = Mock(config=config, learners=learners, pool=pool, rollouts=source)
        return Controller(runtime, Mock(), Mock(out_dir=tmp_path), Mock(), Mock())

    run = controller(finite=False, gap=nan)
    for _ in range(2):
        run.step()
    with pytest.raises(Diverged, match=rf"in 3 steps in a row up to step 3; lower {section}\.learning_rate"):
        run.step()
    if not warm:
        with pytest.raises(WeightSyncMismatch):
            controller(finite=True, gap=nan).step()
        # No token is in the loss, and there is nothing to compare.
        run = controller(finite=True, gap=None)
        run.step()
        logged = run.reporter.log_metrics.call_args.args[1]  # type: ignore[attr-defined]
        assert not {name for name in logged if name.startswith("rollout/logprob_gap")}


def test_evaluations_and_trajectories_are_counted_from_the_end_of_a_warm_start(tmp_path: Path) -> None:
    """Else rules with other passes per step, and so other every_steps, have no evaluation in common."""
    body = {"evaluation": {"every_steps": 6}, "diagnostics": {"trajectory_every": 3}, "checkpoint": {"every_steps": 4}}
    kinds = ("evaluate", "trajectory", "checkpoint")
    for warm_start, evaluated, diagnosed in (
        ({"steps": 5}, [5, 11, 17], [8, 11, 14, 17]),
        (None, [6, 12], [3, 6, 9, 12, 15]),
    ):
        config = RunConfig.model_validate(body | {"warm_start": warm_start})
        controller = Controller(Mock(config=config), Mock(), Mock(out_dir=tmp_path), Mock(), Mock())
        due = [[step for step in range(1, 18) if controller._due(step, kind)] for kind in kinds]
        assert due == [evaluated, diagnosed, [4, 8, 12, 16]], "checkpoints are no cost that is compared"
