"""Plans against measured runs: peak memory and step time on policies of three sizes.

Each size is planned twice: with assumptions calibrated to the runs of all three sizes, and to those of the two others,
so that the plan has not seen the run that it is compared with. The lengths of prompts and responses, which are the
task's, are the run's own. Memory on a
CPU is the resident set of the learner's process at its peak, above that of the same process before it loads the model.

    python -m benchmarks.planner [FOLDER]

keeps the runs in FOLDER and uses those that are there.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import Figure, deviation, save
from benchmarks.policies import ten_million, three_million
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import load_run
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.planner import inputs_of
from gxpo_trainer.planner.devices import CPU, assumptions_for, device_named
from gxpo_trainer.planner.inputs import read_shape, workload_of
from gxpo_trainer.planner.memory import learner_parts
from gxpo_trainer.planner.timing import WARM_UP, Observation, calibrate, lengths_of, observe, step_time
from gxpo_trainer.reporting.reading import CONFIG, METRICS, read_metrics
from gxpo_trainer.training.run import train_run

STEPS = 6
WORK = {"prompts": 12, "group": 8, "new_tokens": 48, "token_budget": 2048, "steps": STEPS}
SIZES = ("1m", "3m", "10m")
MEMORY_GOAL, TIME_GOAL = 0.15, 0.30
SETTINGS = {**WORK, "rule": "gxpo", "sizes": SIZES, "warm_up_steps": WARM_UP}


def planned_run(policy: Path, name: str) -> RunConfig:
    """A short GXPO run with a KL term: without one, groups of equal rewards, which are most of a random policy's, would
    have no backward pass."""
    return RunConfig.model_validate(
        {
            "name": name,
            "model": {"path": str(policy), "max_length": WORK["new_tokens"] + 96},
            "data": {"max_prompt_tokens": 96},
            "rollout": {
                "prompts_per_step": WORK["prompts"],
                "samples_per_prompt": WORK["group"],
                "max_new_tokens": WORK["new_tokens"],
                "ignore_eos": True,
            },
            "learner": {
                "rule": {"name": "gxpo", "gate": {"mode": "never"}},
                "loss": {"kl_beta": 0.001},
                "optimizer": {"learning_rate": 1e-6},
                "token_budget": WORK["token_budget"],
            },
            "evaluation": {"benchmarks": [], "every_steps": 0, "at_start": False},
            "checkpoint": {"every_steps": 0},
            "budget": {"steps": STEPS},
            "placement": {"device": "cpu"},
        }
    )


def measured(root: Path) -> dict[str, Path]:
    """Folders of the runs by size; those that are there already are not repeated."""
    policies = {"1m": STARTER_FOLDER}
    for size, make in (("3m", three_million), ("10m", ten_million)):
        folder = root / f"policy-{size}"
        policies[size] = folder if (folder / "config.json").is_file() else make(folder)
    for size in SIZES:
        if not (root / size / METRICS).is_file():
            train_run(planned_run(policies[size], f"planner {size}"), root / size)
    return {size: root / size for size in SIZES}


def observed(folder: Path) -> tuple[Observation, list[float]]:
    """A run's medians, and its counted step times."""
    config = load_run(folder / CONFIG, [])
    rows = [row["metrics"] for row in read_metrics(folder)]
    inputs = inputs_of(config, read_shape(config.model.path), device_named(CPU))
    steps = [row["time/step_s"] for row in rows if "time/step_s" in row][WARM_UP:]
    return observe(folder.name, inputs, rows), steps


def compare(
    name: str, run: Observation, calibrated_to: Sequence[Observation], step_s: list[float]
) -> tuple[Figure, Figure]:
    """How far a plan of a run is from its step time and from its memory."""
    assumed = lengths_of(calibrate(assumptions_for(run.inputs.device), calibrated_to), run)
    load = workload_of(run.inputs, assumed)
    time = step_time(run.inputs, assumed, load, run.inputs.rule, gate_open=True)
    # Memory is counted from the process before its model on both sides.
    allocated = learner_parts(run.inputs, replace(assumed, runtime_bytes=0), load)
    planned_bytes = sum(allocated.values())
    assert run.memory_bytes is not None
    print(
        f"{name}: step {time.total:.2f} s planned, {run.metrics['time/step_s']:.2f} s measured; "
        f"memory {planned_bytes / 2**20:.0f} MiB planned, {run.memory_bytes / 2**20:.0f} MiB measured"
    )
    memory = deviation(f"peak memory, {name}", float(planned_bytes), [run.memory_bytes], at_most=MEMORY_GOAL)
    return deviation(f"step time, {name}", time.total, step_s, at_most=TIME_GOAL), memory


def report(root: Path) -> None:
    runs = {size: observed(folder) for size, folder in measured(root).items()}
    everything = [run for run, _ in runs.values()]
    figures: list[Figure] = []
    for size, (run, step_s) in runs.items():
        others = [other for other in everything if other is not run]
        figures += compare(f"{size} from all sizes", run, everything, step_s)
        figures += compare(f"{size} from the others", run, others, step_s)
    save("planner", figures, SETTINGS)


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[0].endswith("planner.py"):
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        report(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        report(Path(folder))


if __name__ == "__main__":
    main()
