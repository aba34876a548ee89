"""Real GXPO runs on placements that the test suite has no time for; each with the log-prob gap of its steps.

python -m benchmarks.placements [NAME ...]

The run of the pool of three is made twice: undisturbed, and with 20 of its engines killed (-9) at any moment of its
steps. Both sample with one seed per response, so that each step of one has the prompts and tokens of the other.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from benchmarks.measure import Figure, median, save, single
from gxpo_trainer.config import RunConfig
from gxpo_trainer.jsonl import read_lines
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.reporting.reading import METRICS, read_events
from gxpo_trainer.rollout.sources import OnPolicyRollouts
from gxpo_trainer.rollout.verification import VerifierHandle
from gxpo_trainer.training.run import train_run

STEPS = 4
KILLS = 20
MEAN_GAP, LARGEST_GAP = 1e-6, 1e-4
SMALL_CPUS = {"learner_cpus": 0.4, "verifier_cpus": 0.2, "learner_threads": 1, "sampler_threads": 1}
THREE = "pool of three engines"
RUNS: dict[str, dict[str, Any]] = {
    THREE: {
        "placement": {"samplers": 3, "sampler_cpus": 0.4},
        "rollout": {"deterministic": True},
        "budget": {"steps": 15},
    },
    "tensor parallel 2": {"placement": {"samplers": 1, "tensor_parallel": 2, "sampler_cpus": 1.0}},
    "pool of two engines of tensor parallel 2, temperature 0.7": {
        "placement": {"samplers": 2, "tensor_parallel": 2, "sampler_cpus": 0.6},
        "rollout": {"temperature": 0.7},
    },
    "pool of two engines, LoRA": {
        "placement": {"samplers": 2, "sampler_cpus": 0.6},
        "learner": {"lora": {"rank": 8, "alpha": 16.0}, "optimizer": {"learning_rate": 1e-3}},
    },
}
KILLED = "pool of two engines of tensor parallel 2, temperature 0.7"
"""Here one worker process of an engine is killed (-9) in the second step."""


def config_of(name: str) -> RunConfig:
    body: dict[str, Any] = {
        "name": name,
        "model": {"max_length": 192},
        "rollout": {"prompts_per_step": 32, "samples_per_prompt": 8, "max_new_tokens": 48},
        "evaluation": {"benchmarks": [], "every_steps": 0, "at_start": False},
        "checkpoint": {"every_steps": 0},
        "learner": {"rule": {"name": "gxpo", "k": 5, "gate": {"mode": "never"}}, "optimizer": {"learning_rate": 1e-5}},
        "budget": {"steps": STEPS},
    }
    for part, settings in RUNS[name].items():
        body[part] = {**body.get(part, {}), **settings}
    body["placement"] = SMALL_CPUS | body["placement"]
    return RunConfig.model_validate(body)


@contextmanager
def worker_killed_in_second_step(killed: list[int]) -> Iterator[None]:
    """Kill one worker of the second engine when the first groups of the second step have come."""
    inner_batch, inner_submit = OnPolicyRollouts.batch, VerifierHandle.submit
    present: dict[str, Any] = {}

    def batch(self: Any, step: int) -> Any:
        present.update(pool=self._pool, step=step)
        return inner_batch(self, step)

    def submit(self: Any, submitted: Any) -> Any:
        if present["step"] == 2 and not killed:
            engine = psutil.Process(present["pool"].engines.all[1].process.pid)
            children = engine.children(recursive=True)
            workers = [child for child in children if "VLLM::Worker" in " ".join(child.cmdline())]
            killed.append(workers[0].pid)
            os.kill(workers[0].pid, signal.SIGKILL)
        return inner_submit(self, submitted)

    OnPolicyRollouts.batch, VerifierHandle.submit = batch, submit  # type: ignore[method-assign]
    try:
        yield
    finally:
        OnPolicyRollouts.batch, VerifierHandle.submit = inner_batch, inner_submit  # type: ignore[method-assign]


@contextmanager
def engines_killed(kills: int, killed: list[int], steps: list[Any]) -> Iterator[None]:
    """Kill two engines in each step, some while they sample and some later, until `kills` have died."""
    inner, draw = OnPolicyRollouts.batch, random.Random(0)
    timers: list[threading.Timer] = []

    def batch(self: Any, step: int) -> Any:
        pool = self._pool
        for timer in timers:
            timer.join()
        pool.engines.await_ready(every=True)
        # One that was killed after the last sync is ready until somebody calls it.
        alive = [engine.process.pid for engine in pool.engines.ready if psutil.pid_exists(engine.process.pid)]
        pids = draw.sample(alive, min(2, len(alive), kills - len(killed)))
        timers[:] = [threading.Timer(draw.uniform(0.05, 3.0), os.kill, (pid, signal.SIGKILL)) for pid in pids]
        for timer in timers:
            timer.start()
        killed.extend(pids)
        step_batch = inner(self, step)
        groups = [group.group for group in step_batch.groups]
        steps.append(
            [(group.prompt_token_ids.tolist(), [s.token_ids.tolist() for s in group.samples]) for group in groups]
        )
        return step_batch

    OnPolicyRollouts.batch = batch  # type: ignore[method-assign]
    try:
        yield
    finally:
        OnPolicyRollouts.batch = inner  # type: ignore[method-assign]


def _measure(name: str, out: Path) -> list[Figure]:
    killed: list[int] = []
    if name != THREE:
        with worker_killed_in_second_step(killed) if name == KILLED else nullcontext():
            train_run(config_of(name), out)
        return _figures(name, out, len(killed))
    undisturbed: list[Any] = []
    disturbed: list[Any] = []
    with engines_killed(0, [], undisturbed):
        train_run(config_of(name), out)
    figures = [*_figures(name, out, 0), _rounding([group for step in undisturbed for group in step])]
    with engines_killed(KILLS, killed, disturbed):
        train_run(config_of(name), out.with_name("killed"))
    wrong = sum(mine != theirs for mine, theirs in zip(undisturbed, disturbed, strict=True))
    killed_name = f"{name}, {len(killed)} killed"
    return [
        *figures,
        *_figures(killed_name, out.with_name("killed"), len(killed)),
        Figure(f"{killed_name}: steps with other prompts or tokens", wrong, None, None, "", "0", wrong == 0),
    ]


def _figures(name: str, out: Path, killed: int) -> list[Figure]:
    """Raises RuntimeError unless the run has each step once, and a restart for each process killed."""
    rows = [row for row in read_lines(out / METRICS) if "rollout/logprob_gap_mean" in row["metrics"]]
    restarts = [event for event in read_events(out) if event["kind"] == "sampler_restarted"]
    steps = [row["step"] for row in rows]
    if steps != list(range(1, steps[-1] + 1)) or len(restarts) != killed:
        raise RuntimeError(f"{name}: steps {steps}, {len(restarts)} restarts")
    metrics = [row["metrics"] for row in rows]
    return [
        single(f"{name}: engines restarted after a kill", len(restarts)),
        _largest(f"{name}: largest mean gap of a step", metrics, "rollout/logprob_gap_mean", MEAN_GAP),
        _largest(f"{name}: largest gap of a token", metrics, "rollout/logprob_gap_max", LARGEST_GAP),
        median(f"{name}: step", [row["time/step_s"] for row in metrics], "s"),
    ]


def _rounding(groups: list[tuple[list[int], list[list[int]]]]) -> Figure:
    """How far a token's log-probability in fp32 is from that in fp64, by transformers alone: the noise of a gap."""
    models = [
        AutoModelForCausalLM.from_pretrained(STARTER_FOLDER, dtype=dtype) for dtype in (torch.float32, torch.float64)
    ]
    largest, num_tokens = 0.0, 0
    for prompt, responses in groups:
        for response in responses:
            tokens = torch.tensor(prompt + response)
            with torch.inference_mode():
                scores = [model(tokens[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for model in models]
            narrow, wide = (score.gather(1, tokens[len(prompt) :, None]).double() for score in scores)
            largest, num_tokens = max(largest, float((narrow - wide).abs().max())), num_tokens + len(response)
    return single(f"transformers in fp32 against fp64, {num_tokens} tokens: largest gap of a token", largest)


def _largest(name: str, metrics: list[dict[str, float]], metric: str, limit: float) -> Figure:
    value = max(row[metric] for row in metrics)
    return single(name, value, at_most=limit)


def main(names: list[str] | None = None) -> None:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names or list(RUNS)):
            figures += _measure(name, Path(folder) / str(number))
    save("placements", figures, {"steps": STEPS, "kills": KILLS, "cores": len(os.sched_getaffinity(0))})


if __name__ == "__main__":
    main(sys.argv[1:])
