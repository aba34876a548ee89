"""A full evaluation at the end, in addition to the fixed subset that is compared along the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from gxpo_trainer.config import RunConfig
from gxpo_trainer.data.benchmarks import Benchmark
from gxpo_trainer.environments.contract import Problem
from gxpo_trainer.rollout.requests import SamplingSettings
from gxpo_trainer.training.evaluation import Evaluator
from gxpo_trainer.training.prepare import TokenizedBenchmark
from gxpo_trainer.types import Group, Prompt, Sample, ScoredGroup, Verdict

IDS = np.array([1, 2], dtype=np.int32)


class Collector:
    """Every response to a problem with an even number is right."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def collect(self, requests: Any, sampling: Any, version: int, *, rewards: bool) -> Any:
        self.asked = [request.prompt.id for request in requests]
        return SimpleNamespace(groups=[self._scored(request) for request in requests])

    def _scored(self, request: Any) -> ScoredGroup:
        right = int(request.prompt.id) % 2 == 0
        sample = Sample("7", IDS, np.zeros(2, dtype=np.float32), "stop")
        verdict = Verdict("correct" if right else "wrong", "7", 0.0)
        group = Group(request.prompt, IDS, (sample,) * request.num_samples, 0)
        return ScoredGroup(group, (verdict,) * request.num_samples)


def evaluator() -> Evaluator:
    prompts = tuple(Prompt(str(number), "", "7") for number in (0, 2, 1, 3, 5, 7))
    benchmark = Benchmark("sums", prompts[:2], "{problem}", "hash", {}, prompts[2:])
    config = RunConfig.model_validate({"evaluation": {"samples_per_prompt": 2}})
    return Evaluator(config, [TokenizedBenchmark(benchmark, [IDS] * 2, [IDS] * 4)])


def test_the_subset_alone_is_sampled_along_the_run() -> None:
    collector = Collector()
    _, metrics = evaluator().run(collector, step=1, version=1)  # type: ignore[arg-type]
    assert collector.asked == ["0", "2"]
    assert metrics["eval/sums/pass@1"] == 1.0
    assert not [name for name in metrics if "full" in name]


def test_a_full_evaluation_keeps_the_subset_comparable() -> None:
    collector = Collector()
    (record,), metrics = evaluator().run(collector, step=1, version=1, full=True)  # type: ignore[arg-type]
    assert collector.asked == ["0", "2", "1", "3", "5", "7"]
    assert (record["num_problems"], record["problem_ids"]) == (2, ["0", "2"])
    assert (metrics["eval/sums/pass@1"], metrics["eval/average/pass@1"]) == (1.0, 1.0)
    assert metrics["eval/sums/full/pass@1"] == 2 / 6


def test_how_an_evaluation_samples_is_set_and_recorded() -> None:
    given = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "stop": ["Q:"]}
    benchmark = Benchmark("sums", (Prompt("0", "", "7"),), "{problem}", "hash")
    made = Evaluator(RunConfig.model_validate({"evaluation": given}), [TokenizedBenchmark(benchmark, [IDS])])
    assert made.sampling == SamplingSettings(48, 0.6, top_p=0.95, top_k=20, stop=("Q:",))
    (record,), _ = made.run(Collector(), step=1, version=1)  # type: ignore[arg-type]
    assert record["sampling"] == {**given, "max_new_tokens": 48, "seeded": False}
    (record, *_), _ = evaluator().run(Collector(), step=1, version=1)  # type: ignore[arg-type]
    assert record["sampling"] == {"temperature": 1.0, "max_new_tokens": 48, "seeded": False}


def test_an_evaluation_plays_in_the_environment_of_the_run() -> None:
    prompt = Prompt("0", "6*7?", "42", {"level": "5"})
    benchmark = Benchmark("sums", (prompt,), "Q: {problem}", "hash", {}, ())
    environment = {"name": "calculator", "max_turns": 3, "max_observation_tokens": 20}
    config = RunConfig.model_validate({"environment": environment, "seed": 5})
    requests: list[Any] = []

    class Recorder(Collector):
        def collect(self, wanted: Any, sampling: Any, version: int, *, rewards: bool) -> Any:
            requests.extend(wanted)
            return super().collect(wanted, sampling, version, rewards=rewards)

    (record,), _ = Evaluator(config, [TokenizedBenchmark(benchmark, [IDS])]).run(Recorder(), step=1, version=1)  # type: ignore[arg-type]
    (request,) = requests
    assert request.episode.problem == Problem("0", "Q: 6*7?", "42", {"level": "5"})
    assert request.episode.max_prompt_tokens is None, "only the model limits prompts of benchmarks"
    assert record["environment"] == environment
    assert request.seed is None
    (again,), _ = evaluator().run(Collector(), step=1, version=1)  # type: ignore[arg-type]
    assert "environment" not in again
