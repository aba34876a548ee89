"""What a config would cost before it starts: backward passes, memory and time (gxpo_trainer.planner)."""

from __future__ import annotations

from pydantic import BaseModel, Field

from gxpo_services.settings import ServiceSettings
from gxpo_trainer.config import RunConfig
from gxpo_trainer.data.checks import FIRST_ROWS, check_files
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner import Plan, inputs_of, make_plan, refusal
from gxpo_trainer.planner.devices import CPU, DEFAULT_GPU, device_named
from gxpo_trainer.planner.inputs import read_shape
from gxpo_trainer.planner.report import PlanView, view_of


class ExpectedCostView(BaseModel):
    """Maximum cost of a run."""

    steps: int | None = Field(description="Null when only hours or tokens limit the run.")
    backward_passes: int | None = Field(description="Full-batch gradients, an upper bound; null when unknown.")
    per_step_words: str = Field(examples=["GXPO: 3 backward passes per step (probes + 1)"])


def expected_cost(config: RunConfig) -> ExpectedCostView:
    """The passes of a step that the rule declares, as long as the gate keeps the look-ahead on: one that fires makes a
    run cheaper.

    Without repeated steps and diagnostics. `learner.mini_batches` changes nothing: passes are counted in full batches.
    """
    rule, budget = config.learner.rule, config.budget
    per_step, formula = rule.passes_per_step(gate_open=True), rule.passes_formula()
    words = f"{rule.label}: {per_step} backward pass{'es' if per_step > 1 else ''} per step"
    words += f" ({formula})" if formula else ""
    if (gate := rule.gate_config) is not None and gate.can_fire:
        when = "while the gate is closed" if gate.mode == "rearm" else "after the gate has fired"
        words += f", {rule.passes_per_step(gate_open=False)} {when} (upper bound)"
    steps, passes = budget.steps, budget.backward_passes
    by_steps = None if steps is None else steps * per_step
    bounds = [bound for bound in (by_steps, passes) if bound is not None]
    if passes is not None and (by_steps is None or passes < by_steps):
        words += f"; budget.backward_passes = {passes} ends the run"
        if gate is None:
            steps = -(-passes // per_step)
    if not bounds:
        words += "; hours or tokens end the run, so the number of steps is unknown"
    return ExpectedCostView(steps=steps, backward_passes=min(bounds, default=None), per_step_words=words)


def resources(config: RunConfig) -> tuple[float, float]:
    """Logical CPUs and GPUs that a run holds: CPUs with "auto" in full, GPUs the fewest where it may share them.

    With `placement.device = "auto"` these are the GPUs that it holds in a cluster that has some.
    """
    placement = config.without_idle_engines().placement
    gpus = 0 if placement.device == "cpu" else placement.num_gpus(colocated=placement.can_colocate)
    return placement.total_cpus(placement.cpu_shares()), float(gpus)


def planned(config: RunConfig, server: ServiceSettings) -> tuple[PlanView | None, str | None]:
    """The plan, or why there is none."""
    try:
        return view_of(_plan(config, server)), None
    except ConfigError as error:
        return None, str(error)


def cannot_work(config: RunConfig, server: ServiceSettings) -> list[tuple[str, str]]:
    """(setting, reason) of what the run's files show, as far as this host has the folders of the trainers."""
    roots = {"model": server.model_roots, "data": server.data_roots}
    unseen = [name for name, folders in roots.items() if folders and not any(folder.is_dir() for folder in folders)]
    checks = check_files(config, most=FIRST_ROWS, unseen=unseen)
    return [(setting, str(error)) for setting, error in checks.faults]


def cannot_fit(config: RunConfig, server: ServiceSettings) -> list[tuple[str, str]]:
    """(setting, the planner's sentence) for a run that cannot fit on the GPUs of this server's cluster.

    Empty where their kind is not set (GXPO_GPU), for runs without GPUs, and for models of unknown shape.
    """
    if server.gpu is None or config.placement.device == "cpu":
        return []
    try:
        sentence = refusal(_plan(config, server))
    except ConfigError:
        return []
    return [] if sentence is None else [("placement", sentence)]


def _plan(config: RunConfig, server: ServiceSettings) -> Plan:
    on_gpu = config.placement.device == "gpu" or (config.placement.device == "auto" and server.gpu is not None)
    device = device_named(server.gpu or DEFAULT_GPU) if on_gpu else device_named(CPU)
    return make_plan(inputs_of(config, read_shape(config.model.path), device))
