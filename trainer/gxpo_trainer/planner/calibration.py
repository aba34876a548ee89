"""Assumptions fitted to runs: what `gxpo plan --calibrate RUN_DIR` replaces the defaults with.

One run fixes one factor for each of the learner's time, the sampler's time and the learner's memory. Several runs of
different sizes separate what grows with the work from what does not: a non-negative least-squares fit of two terms to
relative errors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner.devices import Assumptions
from gxpo_trainer.planner.inputs import Inputs
from gxpo_trainer.planner.memory import learner_parts
from gxpo_trainer.planner.timing import StepTime, step_time
from gxpo_trainer.planner.workload import workload_of

WARM_UP = 2
"""First steps of a run that are left out where there are others: caches fill and kernels are chosen."""
REQUIRED = ("rollout/length_mean", "time/rollout_s", "time/update_s", "time/step_s", "update/backward_passes")
Term = tuple[float, float, float]
"""Modelled share that grows with the work, modelled fixed share, measured."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Medians over a run's steps, by metric, and the inputs that the run had."""

    name: str
    inputs: Inputs
    metrics: Mapping[str, float]

    @property
    def passes(self) -> float:
        return self.metrics["update/backward_passes"]

    @property
    def memory_bytes(self) -> float | None:
        """The learner's peak without what its process holds before the model: on a GPU the device's, else resident."""
        if self.inputs.on_gpu:
            return self.metrics.get("system/learner_device_peak_bytes")
        peak, idle = self.metrics.get("system/learner_peak_bytes"), self.metrics.get("system/learner_idle_bytes")
        return None if peak is None or idle is None else peak - idle


def observe(name: str, inputs: Inputs, rows: Sequence[Mapping[str, float]]) -> Observation:
    """Medians over the steps of a run. rows: metrics of its steps. Raises ConfigError when it has none to fit to."""
    steps = [row for row in rows if all(key in row for key in REQUIRED)]
    steps = steps[WARM_UP:] if len(steps) > WARM_UP else steps
    if not steps:
        raise ConfigError(f"--calibrate {name}: no step has {', '.join(REQUIRED)}; name the folder of a run with steps")
    names = {key for row in steps for key in row}
    medians = {key: statistics.median(row[key] for row in steps if key in row) for key in names}
    peaks = [row["system/learner_peak_bytes"] for row in steps if "system/learner_peak_bytes" in row]
    return Observation(name, inputs, medians | ({"system/learner_peak_bytes": max(peaks)} if peaks else {}))


def calibrate(base: Assumptions, runs: Sequence[Observation]) -> Assumptions:
    """`base` with everything that the runs measured in its place."""
    own = [lengths_of(base, run) for run in runs]
    pairs = list(zip(runs, own, strict=True))
    work, fixed = fit_two([_learner_term(run, mine) for run, mine in pairs])
    engine, scheduler = fit_two([_sampler_term(run, mine) for run, mine in pairs])

    def mean(values: Sequence[float]) -> float:
        return statistics.fmean(values)

    fitted = replace(
        base,
        utilization=base.utilization / work if work else 1.0,
        micro_batch_s=base.micro_batch_s * fixed,
        sampling_efficiency=base.sampling_efficiency / engine if engine else 1.0,
        decode_step_s=base.decode_step_s * scheduler,
        token_s=base.token_s * scheduler,
        verify_s=mean([run.metrics.get("time/verify_s", base.verify_s) for run in runs]),
        sync_s=mean([_fixed_sync(base, run) for run in runs]),
        step_s=mean([_unnamed(run) for run in runs]),
        prompt_fraction=mean([mine.prompt_fraction for mine in own]),
        response_fraction=mean([mine.response_fraction for mine in own]),
        zero_variance_fraction=mean([mine.zero_variance_fraction for mine in own]),
        source=f"calibrated to {', '.join(run.name for run in runs)}",
    )
    return _with_memory(fitted, runs, own)


def lengths_of(base: Assumptions, run: Observation) -> Assumptions:
    """`base` with a run's own lengths and share of groups without a backward pass."""
    inputs, metrics = run.inputs, run.metrics
    prompt = metrics.get("rollout/prompt_length_mean")
    return replace(
        base,
        prompt_fraction=base.prompt_fraction if prompt is None else prompt / inputs.prompt_limit,
        response_fraction=metrics["rollout/length_mean"] / inputs.response_limit,
        zero_variance_fraction=metrics.get("reward/zero_variance_fraction", base.zero_variance_fraction),
    )


def fit_two(terms: Sequence[Term]) -> tuple[float, float]:
    """Factors x, y ≥ 0 that minimize Σ ((x·a + y·b)/measured − 1)² over terms (a, b, measured).

    One term, or terms that are multiples of each other, leave the shares as they are: x = y.
    """
    rows = [(a / m, b / m) for a, b, m in terms if m > 0]
    if not rows:
        return 1.0, 1.0
    aa, bb, ab = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (1, 1), (0, 1)))
    a, b = (sum(r[i] for r in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if len(rows) > 1 and determinant > 1e-6 * aa * bb:
        x, y = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if x >= 0 and y >= 0:
            return x, y
        return (a / aa, 0.0) if y < 0 else (0.0, b / bb)
    total = [r[0] + r[1] for r in rows]
    both = sum(total) / sum(value * value for value in total)
    return both, both


def _learner_term(run: Observation, assumed: Assumptions) -> Term:
    whole = _modelled(run, assumed).update
    work = _modelled(run, replace(assumed, micro_batch_s=0.0)).update
    moved = _modelled(run, replace(assumed, micro_batch_s=0.0, utilization=math.inf)).update
    return _term(whole, work, moved, run.metrics["time/update_s"])


def _sampler_term(run: Observation, assumed: Assumptions) -> Term:
    whole = _modelled(run, assumed).sampling
    work = _modelled(run, replace(assumed, decode_step_s=0.0, token_s=0.0)).sampling
    moved = _modelled(run, replace(assumed, decode_step_s=0.0, token_s=0.0, sampling_efficiency=math.inf)).sampling
    return _term(whole, work, moved, run.metrics["time/rollout_s"])


def _term(whole: float, work: float, moved: float, measured: float) -> Term:
    """moved: what no factor changes; at most 99 % of what was measured is put down to it."""
    return work - moved, whole - work, max(measured - moved, measured / 100)


def _modelled(run: Observation, assumed: Assumptions) -> StepTime:
    """The step that the run's median step was: with its look-ahead where it took more than one pass."""
    inputs = run.inputs
    return step_time(inputs, assumed, workload_of(inputs, assumed), inputs.rule, gate_open=run.passes > 1.0)


def _fixed_sync(base: Assumptions, run: Observation) -> float:
    load = workload_of(run.inputs, base)
    moved = step_time(run.inputs, base, load, run.inputs.rule, gate_open=False).sync - base.sync_s
    return max(0.0, run.metrics.get("time/sync_s", base.sync_s + moved) - moved)


def _unnamed(run: Observation) -> float:
    named = ("time/rollout_s", "time/verify_s", "time/update_s", "time/sync_s")
    return max(0.0, run.metrics["time/step_s"] - sum(run.metrics.get(name, 0.0) for name in named))


def _with_memory(assumed: Assumptions, runs: Sequence[Observation], own: Sequence[Assumptions]) -> Assumptions:
    """With the learner's memory: its process before the model, and the measured over the counted bytes after it."""
    terms: list[Term] = []
    for run, mine in zip(runs, own, strict=True):
        counting = replace(mine, memory_factor=1.0, runtime_bytes=0, engine_bytes=0)
        counted = sum(part.num_bytes for part in learner_parts(run.inputs, counting, workload_of(run.inputs, counting)))
        if run.memory_bytes is not None:
            terms.append((float(counted), float(assumed.engine_bytes), run.memory_bytes))
    if not terms:
        return assumed
    factor, fixed = fit_two(terms)
    idle = [run.metrics["system/learner_idle_bytes"] for run in runs if "system/learner_idle_bytes" in run.metrics]
    on_host = not runs[0].inputs.on_gpu and bool(idle)
    runtime = int(statistics.fmean(idle)) if on_host else assumed.runtime_bytes
    engine = int(fixed * assumed.engine_bytes)
    return replace(assumed, memory_factor=factor, runtime_bytes=runtime, engine_bytes=engine)
