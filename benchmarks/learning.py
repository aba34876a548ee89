"""Does the starter policy learn? 40 GXPO steps on three seeds: held-out accuracy before and after, with intervals.

The difference is paired by problem: 512 held-out problems, 8 samples each, the same before and after.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.measure import Figure, save
from gxpo_trainer.config.io import load_preset
from gxpo_trainer.records.reading import read_evaluations
from gxpo_trainer.training.run import train_run

SEEDS = (0, 1, 2)
GAIN = 0.05


def main() -> None:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            config = load_preset(
                "demo",
                [
                    f"seed={seed}",
                    "evaluation.every_steps=0",
                    "evaluation.num_problems=512",
                    "evaluation.samples_per_prompt=8",
                ],
            )
            out = Path(folder) / f"seed-{seed}"
            train_run(config, out)
            rows = read_evaluations(out)
            before, after = (np.array(row["per_problem"]) for row in (rows[0], rows[-1]))
            figures.append(_gain(seed, before, after))
            figures.append(Figure(f"seed {seed}: accuracy before", before.mean(), *_interval(before), ""))
            figures.append(Figure(f"seed {seed}: accuracy after", after.mean(), *_interval(after), ""))
    save("learning", figures, {"preset": "demo", "steps": 40, "problems": 512, "samples": 8})


def _gain(seed: int, before: np.ndarray, after: np.ndarray) -> Figure:
    gain = after - before
    low, high = _interval(gain)
    met = bool(gain.mean() >= GAIN and low > 0)
    return Figure(f"seed {seed}: gain", gain.mean(), low, high, "", f"≥ {GAIN:g}, interval above 0", met)


def _interval(values: np.ndarray) -> tuple[float, float]:
    draws = np.random.default_rng(0).integers(0, len(values), size=(5000, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


if __name__ == "__main__":
    main()
