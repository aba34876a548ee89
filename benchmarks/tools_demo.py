"""Does the starter policy learn to use the calculator? 40 GXPO steps of tools-demo on three seeds.

Held-out accuracy before and after: 512 problems, 2 samples each, paired by problem; over seeds, the mean of each
problem's accuracies. The use of the tool is the mean number of turns of an episode, and the share of
recorded responses with a calculation, in the first and the last step. An argument names a folder to keep the runs in.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.measure import Figure, mean, save
from gxpo_trainer.compare.intervals import Floats
from gxpo_trainer.config.io import load_preset
from gxpo_trainer.reporting.reading import read_evaluations, read_metrics, read_samples
from gxpo_trainer.training.run import train_run
from tools.starter_tools import OPEN

PRESET = "tools-demo"
SEEDS = (0, 1, 2)
GAIN = 0.05
PROBLEMS, SAMPLES = 512, 2


def main(arguments: list[str] | None = None) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments[0]) if arguments else Path(temporary)
        figures: list[Figure] = []
        before: list[Floats] = []
        after: list[Floats] = []
        for seed in SEEDS:
            out = folder / f"seed-{seed}"
            if not (out / "outcome.json").exists():
                _train(seed, out)
            first, last = scores(out)
            before.append(first)
            after.append(last)
            figures += [*accuracies(f"seed {seed}", first, last), *_tool_use(f"seed {seed}", out)]
        figures += accuracies("over seeds", np.mean(before, axis=0), np.mean(after, axis=0))
    save("tools_demo", figures, {"preset": PRESET, "steps": 40, "problems": PROBLEMS, "samples": SAMPLES})


def _train(seed: int, out: Path) -> None:
    """A run of the preset, evaluated before and after."""
    evaluation = {"every_steps": 0, "num_problems": PROBLEMS, "samples_per_prompt": SAMPLES}
    overrides = [f"evaluation.{name}={value}" for name, value in evaluation.items()]
    train_run(load_preset(PRESET, [f"seed={seed}", *overrides]), out)


def scores(out: Path) -> tuple[Floats, Floats]:
    """Held-out accuracy of each problem before and after the run: float[problems]."""
    rows = read_evaluations(out)
    return np.array(rows[0]["per_problem"]), np.array(rows[-1]["per_problem"])


def accuracies(name: str, before: Floats, after: Floats, least: float = GAIN) -> list[Figure]:
    """The gain, paired by problem, and both accuracies."""
    gain = mean(f"{name}: gain", after - before, at_least=least)
    met = bool(gain.met and gain.low is not None and gain.low > 0)
    return [
        replace(gain, goal=f"{gain.goal}, interval above 0", met=met),
        mean(f"{name}: accuracy before", before),
        mean(f"{name}: accuracy after", after),
    ]


def _tool_use(name: str, out: Path) -> list[Figure]:
    """Turns of an episode and share of responses with a call, in the first and the last step."""
    turns = [row["metrics"]["env/turns_mean"] for row in read_metrics(out) if "env/turns_mean" in row["metrics"]]
    figures = [
        _plain(f"{name}: turns in the first step", turns[0]),
        _plain(f"{name}: turns in the last step", turns[-1], met=turns[-1] > turns[0]),
    ]
    samples = read_samples(out)
    for when, step in (("first", samples[0]["step"]), ("last", samples[-1]["step"])):
        calls = [OPEN in row["response"] for row in samples if row["step"] == step]
        figures.append(_plain(f"{name}: recorded responses with a call in the {when} step", float(np.mean(calls))))
    return figures


def _plain(name: str, value: float, met: bool | None = None) -> Figure:
    return Figure(name, value, None, None, "", None if met is None else "above the first", met)


if __name__ == "__main__":
    main(sys.argv[1:])
