"""A full evaluation at the end, in addition to the fixed subset that is compared along the run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.command_line import Gxpo
from support.data_files import write

from gxpo_trainer import cli
from gxpo_trainer.config import RunConfig
from gxpo_trainer.data.benchmarks import Benchmark
from gxpo_trainer.environments.contract import Problem
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.learner.rank import StepResult
from gxpo_trainer.rollout.sources import Rollouts
from gxpo_trainer.rollout.vllm_driver import SamplingSettings
from gxpo_trainer.training import evaluation
from gxpo_trainer.training.controller import (
    careful_metrics,
    environment_metrics,
    no_signal,
    rollout_metrics,
    staleness_metrics,
)
from gxpo_trainer.training.evaluation import Evaluator, score_groups
from gxpo_trainer.training.prepare import TokenizedBenchmark
from gxpo_trainer.types import Episode, EpisodeEnd, Group, Prompt, Sample, ScoredGroup, Utterance, Verdict

IDS = np.array([1, 2], dtype=np.int32)


class Collector:
    """Every response to a problem with an even number is right."""

    def __init__(self, otherwise: str = "wrong") -> None:
        self.otherwise = otherwise

    def collect(self, requests: Any, sampling: Any, version: int) -> Any:
        self.requests, self.sampling, self.version = requests, sampling, version
        return SimpleNamespace(groups=[self._scored(request) for request in requests])

    def _scored(self, request: Any) -> ScoredGroup:
        right = int(request.prompt.id) % 2 == 0
        sample = Sample("7", IDS, np.zeros(2, dtype=np.float32), "stop")
        verdict = Verdict("correct" if right else self.otherwise, "7", 0.0)  # type: ignore[arg-type]
        group = Group(request.prompt, IDS, (sample,) * request.num_samples, 0)
        return ScoredGroup(group, (verdict,) * request.num_samples)


def evaluator() -> Evaluator:
    prompts = tuple(Prompt(str(number), "", "7") for number in (0, 2, 1, 3, 5, 7))
    benchmark = Benchmark("sums", prompts[:2], "{problem}", "hash", {}, prompts[2:])
    config = RunConfig.model_validate({"evaluation": {"samples_per_prompt": 2}})
    return Evaluator(config, [TokenizedBenchmark(benchmark, [IDS] * 2, [IDS] * 4)])


def test_a_full_evaluation_keeps_the_subset_comparable() -> None:
    collector = Collector()
    (record,), metrics = evaluator().run(collector, version=1, full=True)  # type: ignore[arg-type]
    assert [request.prompt.id for request in collector.requests] == ["0", "2", "1", "3", "5", "7"]
    assert (record["num_problems"], record["problem_ids"]) == (2, ["0", "2"])
    assert (metrics["eval/sums/pass@1"], metrics["eval/average/pass@1"]) == (1.0, 1.0)
    assert metrics["eval/sums/full/pass@1"] == 2 / 6


def test_an_evaluation_samples_and_plays_as_it_is_set_which_is_recorded() -> None:
    given = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    environment = {"name": "calculator", "max_turns": 3, "max_observation_tokens": 20}
    config = RunConfig.model_validate({"evaluation": given, "environment": environment, "seed": 5})
    benchmark = Benchmark("sums", (Prompt("0", "6*7?", "42", {"level": "5"}),), "Q: {problem}", "hash", {}, ())
    made, collector = Evaluator(config, [TokenizedBenchmark(benchmark, [IDS])]), Collector()
    assert made.sampling == SamplingSettings(48, 0.6, top_p=0.95, top_k=20)
    (record,), _ = made.run(collector, version=1)  # type: ignore[arg-type]
    assert record["sampling"] == {**given, "max_new_tokens": 48, "seeded": False}
    assert record["environment"] == environment
    assert (collector.sampling, collector.version) == (made.sampling, 1)
    (request,) = collector.requests
    assert request.episode.problem == Problem("0", "Q: 6*7?", "42", {"level": "5"})
    assert request.episode.max_prompt_tokens is None, "only the model limits prompts of benchmarks"
    assert request.seed is None
    stopped = Evaluator(RunConfig.model_validate({"evaluation": {"stop": ["Q:"]}}), [])
    assert stopped.sampling.stop == ("Q:",)
    (plain, *_), _ = evaluator().run(Collector(), version=1)  # type: ignore[arg-type]
    assert plain["sampling"] == {"temperature": 1.0, "max_new_tokens": 48, "seeded": False}
    assert "environment" not in plain


@pytest.mark.parametrize("failed", [False, True])
def test_the_command_scores_by_its_settings_and_shows_what_failed(
    failed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def session(placement: Any, on_wait: Callable[[str], None]) -> Iterator[Any]:
        for missing in ("1 GPU", "1 GPU", "2 GPUs"):
            on_wait(missing)
        yield placement

    collector = Collector("error" if failed else "wrong")
    pool = SimpleNamespace(start=lambda: None, kill=lambda: None, collect=collector.collect)
    monkeypatch.setattr(evaluation, "ray_session", session)
    monkeypatch.setattr(evaluation, "build_pool", lambda *_: pool)
    own = write(tmp_path / "own.jsonl", *({"id": str(n), "problem": "6+1?", "answer": "7"} for n in range(4)))
    command = "eval", "--model", "starter-random", "--benchmark", own, "--samples", 2, "--out", tmp_path / "out.jsonl"
    settings = "--set", "evaluation.samples_per_prompt=3", "--set", f"model.path={STARTER_FOLDER}"
    gxpo = Gxpo(capsys)
    assert gxpo(*command, *settings) == 0
    printed = gxpo.printed()
    assert printed.err.splitlines() == ["eval: waiting for 1 GPU", "eval: waiting for 2 GPUs"]
    record = json.loads((tmp_path / "out.jsonl").read_text())
    assert (record["model"], record["samples_per_prompt"]) == (str(STARTER_FOLDER), 3)
    title, header, _, row = filter(None, map(str.strip, printed.out.splitlines()))
    assert title == "3 samples per problem, 95% intervals"
    assert "maj@3" in header
    assert header.split()[-1] == ("failed" if failed else "truncated")
    # The responses to two of four problems fail, or are wrong; none is truncated.
    assert row.split()[-2:] == (["0.0%", "50.0%"] if failed else ["2", "0.0%"])


@pytest.mark.parametrize(
    ("most", "words", "limit", "length"),
    [
        (4096, (), 3072, 4096),
        (1536, (), 768, 1536),  # half, as 1024 for the prompt would be more
        (512, (), 256, 512),
        (512, ("--max-new-tokens", "440"), 440, 512),
        (512, ("--set", "evaluation.max_new_tokens=400"), 400, 512),
        (8192, (), 3072, 3072 + 1024),
        (512, ("--set", "environment.name=calculator", "--set", "environment.max_turns=2"), (512 - 64) // 2, 512),
    ],
)
def test_responses_leave_room_for_a_prompt_in_the_models_positions(
    most: int, words: tuple[str, ...], limit: int, length: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(STARTER_FOLDER, tmp_path / "model")
    body = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**body, "max_position_embeddings": most}))
    own = write(tmp_path / "own.jsonl", *({"problem": "1+" * n + "1?", "answer": "7"} for n in (0, 30)))
    command = "eval", "--model", str(model), "--benchmark", str(own), *words
    config, _ = evaluation._config(cli.build_parser().parse_args(command))
    assert (config.evaluation.max_new_tokens, config.model.max_length) == (limit, length)
    if limit == 440:
        told = "new tokens in model.max_length = 512; lower --max-new-tokens; the model has 512 positions\n"
        assert Gxpo(capsys).error(2, *command).endswith(f"1 prompts of {own} leave no room for 440 {told}")
        told = "; lower --max-new-tokens; the model has 512 positions\n"
        assert Gxpo(capsys).error(2, *command, "--max-new-tokens", "600").endswith(told)
        turns = "--set", "environment.name=calculator", "--set", "environment.max_turns=20"
        told = "the environment may write 1216 tokens, and the model has 512 positions; lower environment.max_turns"
        assert told in Gxpo(capsys).error(2, *command, *turns)


def test_the_terminal_numbers_the_steps_after_a_warm_start_from_one() -> None:
    config = RunConfig.model_validate({"data": {"source": "word_problems"}, "warm_start": {"steps": 2}})
    made = Evaluator(config, evaluator().benchmarks)
    _, metrics = made.run(Collector(), version=1)  # type: ignore[arg-type]
    told = [made.describe(step, metrics).partition(" pass@1: ")[0] for step in (0, 1, 2, 3, 5)]
    assert told == ["step 0", "warm start step 1", "warm start step 2", "step 1", "step 3"]
    assert evaluator().describe(3, metrics).startswith("step 3 pass@1: sums 100.0% [")


# Metrics of steps whose samples are conversations, by hand.


ASK, GIVEN = Utterance("policy", "<calc>1+1</calc>"), Utterance("environment", "2")


def sample(sampled: list[int], end: EpisodeEnd, turns: int, versions: tuple[tuple[int, int], ...]) -> Sample:
    """turns: of the policy, each but the last with a response."""
    mask = np.array(sampled, dtype=np.bool_)
    ids = np.arange(len(mask), dtype=np.int32)
    episode = Episode((*[ASK, GIVEN] * (turns - 1), *[ASK] * min(turns, 1)), end)
    return Sample("", ids, ids.astype(np.float32), "stop", versions, mask, episode)


def rollouts(*samples: Sample) -> Rollouts:
    group = Group(Prompt("a", "a", "1"), np.array([1, 2], dtype=np.int32), samples, weights_version=3)
    scored = [ScoredGroup(group, tuple(Verdict("wrong", None, 0.0) for _ in samples))]
    return Rollouts(scored, sum(sample.num_sampled for sample in samples), 1.0, 0.0, 0, sampling_s=2.0)


CONVERSATIONS = rollouts(
    sample([1, 1, 0, 0, 0, 1], "done", 2, ((3, 5), (4, 1))),
    sample([1, 0, 1, 0, 1, 1], "max_turns", 3, ((4, 6),)),
    sample([1], "timeout", 1, ((4, 1),)),
    sample([], "error", 0, ()),
)


def test_episodes_by_their_ends_and_turns() -> None:
    samples = list(CONVERSATIONS.groups[0].group.samples)
    ends = {f"env/{end}_fraction": 0.25 for end in ("done", "timeout", "error")}
    means = {"env/turns_mean": (2 + 3 + 1 + 0) / 4, "env/observation_tokens": (3 + 2) / 4}
    assert environment_metrics(samples) == ends | means
    plain = Sample("", np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32), "stop")
    assert environment_metrics([plain]) == {}


def test_lengths_rates_and_staleness_count_sampled_tokens() -> None:
    result = StepResult({}, 1, 0, 0.0, 0.0, True, None, 1.0, 0.0, 0)
    metrics = rollout_metrics(CONVERSATIONS, result, version=4, total=8)
    # 3, 4, 1 and 0 sampled tokens.
    rollout = [metrics[f"rollout/{name}"] for name in ("tokens", "tokens_per_s", "length_mean")]
    assert (*rollout, metrics["env/turns_mean"]) == (8, 4, 2, 1.5)
    assert metrics["rollout/length_std"] == pytest.approx(((1 + 4 + 1 + 4) / 4) ** 0.5)
    assert score_groups(CONVERSATIONS.groups)[0]["length_mean"] == 2
    # Version 3 sampled 2 tokens of the first response (and saw 3 of its environment), version 4 all others: 6.
    metrics = staleness_metrics(CONVERSATIONS, version=5)
    assert metrics["rollout/staleness_mean"] == (2 * 2 + 6 * 1) / 8
    assert metrics["rollout/staleness_max"] == 2


def test_the_share_of_correct_answers_is_that_of_problems_with_an_answer() -> None:
    result = StepResult({}, 1, 0, 0.0, 0.0, True, None, 1.0, 0.0, 0)
    shares = []
    for statuses in (("correct", "wrong", "ungraded", "ungraded"), ("ungraded",) * 4):
        verdicts = tuple(Verdict(status, None, 0.0, score=0.5) for status in statuses)
        groups = [ScoredGroup(CONVERSATIONS.groups[0].group, verdicts)]
        metrics = rollout_metrics(replace(CONVERSATIONS, groups=groups), result, version=4, total=8)
        shares.append(metrics.get("reward/correctness"))
    assert shares == [0.5, None]


def test_what_to_do_without_a_signal_depends_on_the_reward() -> None:
    metrics = {"reward/zero_variance_fraction": 1.0, "rollout/truncated_fraction": 0.5, "reward/mean": 0.02}
    assert "groups, which have no gradient; 50% of the responses are truncated: choose" in no_signal(metrics, own=False)
    too_hard, solved = (no_signal(metrics | {"reward/correctness": share}, own=False) for share in (0.02, 0.98))
    assert "2% of the responses are correct and 50% truncated: choose problems that the model solves some" in too_hard
    assert solved.endswith("98% of the responses are correct and 50% truncated: choose harder problems")
    saturated = no_signal(metrics | {"reward/correctness": 0.0, "reward/mean": 1.0}, own=True)
    assert "mean reward 1.000, 0% of the responses are correct and 50% truncated: if that is the high" in saturated
    assert "gxpo sft" not in saturated


def test_sampled_tokens_of_each_version() -> None:
    first, second, *_ = CONVERSATIONS.groups[0].group.samples
    assert first.sampled_versions == ((3, 2), (4, 1))
    assert second.sampled_versions == ((4, 4),)
    # A version that only an observation belongs to sampled nothing.
    assert sample([1, 0, 0, 1], "done", 2, ((1, 1), (2, 2), (3, 1))).sampled_versions == ((1, 1), (3, 1))
    plain = Sample("", np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32), "stop", ((1, 3),))
    assert plain.sampled_versions == ((1, 3),)


def test_careful_answers_are_those_with_a_calculation() -> None:
    def answers(**correct: bool) -> ScoredGroup:
        samples = tuple(Sample(text, IDS, np.zeros(2, np.float32), "stop") for text in correct)
        verdicts = tuple(Verdict("correct" if right else "wrong", None, 0.0) for right in correct.values())
        return ScoredGroup(Group(Prompt("a", "a", "1"), IDS, samples, weights_version=3), verdicts)

    hasty = answers(**{"\\boxed{4}": True, "\\boxed{5}": False})
    mixed = answers(**{"1+3=4, so \\boxed{4}": True, "\\boxed{4}": True, "1+3=5, so \\boxed{5}": False})
    assert careful_metrics([hasty]) == {"response/careful_fraction": 0}
    # Two of five answers calculate, and one of the two is right.
    assert careful_metrics([hasty, mixed]) == {"response/careful_fraction": 0.4, "response/careful_correctness": 0.5}
