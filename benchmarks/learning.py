"""Does the starter policy learn? 40 GXPO steps on three seeds: held-out accuracy before and after, with intervals.

The difference is paired by problem: 512 held-out problems, 8 samples each, the same before and after.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.measure import Figure, save
from gxpo_trainer.compare.intervals import Floats
from gxpo_trainer.config.io import load_preset
from gxpo_trainer.reporting.reading import read_evaluations
from gxpo_trainer.training.run import train_run

SEEDS = (0, 1, 2)
GAIN = 0.05
PROBLEMS, SAMPLES = 512, 8


def main() -> None:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            out = Path(folder) / f"seed-{seed}"
            train("demo", seed, out, SAMPLES)
            figures += accuracies(f"seed {seed}", *scores(out))
    save("learning", figures, {"preset": "demo", "steps": 40, "problems": PROBLEMS, "samples": SAMPLES})


def train(preset: str, seed: int, out: Path, samples: int) -> None:
    """A run of the preset, evaluated before and after."""
    evaluation = {"every_steps": 0, "num_problems": PROBLEMS, "samples_per_prompt": samples}
    overrides = [f"evaluation.{name}={value}" for name, value in evaluation.items()]
    train_run(load_preset(preset, [f"seed={seed}", *overrides]), out)


def scores(out: Path) -> tuple[Floats, Floats]:
    """Held-out accuracy of each problem before and after the run: float[problems]."""
    rows = read_evaluations(out)
    return np.array(rows[0]["per_problem"]), np.array(rows[-1]["per_problem"])


def accuracies(name: str, before: Floats, after: Floats, least: float = GAIN) -> list[Figure]:
    """The gain, paired by problem, and both accuracies."""
    gain = after - before
    low, high = _interval(gain)
    met = bool(gain.mean() >= least and low > 0)
    return [
        Figure(f"{name}: gain", float(gain.mean()), low, high, "", f"≥ {least:g}, interval above 0", met),
        Figure(f"{name}: accuracy before", float(before.mean()), *_interval(before), ""),
        Figure(f"{name}: accuracy after", float(after.mean()), *_interval(after), ""),
    ]


def _interval(values: Floats) -> tuple[float, float]:
    draws = np.random.default_rng(0).integers(0, len(values), size=(5000, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


if __name__ == "__main__":
    main()
