"""From inputs to a plan: whether every phase fits its device, what to change if not, seconds and cost of the budget.

Advice follows from the counted memory: settings are tried in order until one makes the run fit, first those that leave
the result as it is (placement, the sampler's memory, checkpointing, ZeRO, token budget), then LoRA.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from pydantic import BaseModel, Field, ValidationError

from gxpo_trainer.config import LoraConfig, RuleSettings
from gxpo_trainer.config.engines import TOKEN_BUDGET
from gxpo_trainer.config.rules import compared_rules
from gxpo_trainer.planner.devices import GIB, Assumptions, assumptions_for
from gxpo_trainer.planner.inputs import Inputs, Workload, workload_of
from gxpo_trainer.planner.memory import (
    NO_SAMPLER,
    Parts,
    Phase,
    SamplerMemory,
    learner_parts,
    released_parts,
    sampler_memory,
)
from gxpo_trainer.planner.timing import PlannedSeconds, step_time

MARGIN = 0.15
"""Relative error of a learner's planned memory. A run that exceeds a device by less is not refused."""
TOKEN_BUDGETS = (16_384, 8192, TOKEN_BUDGET)
"""Of `learner.token_budget = "auto"` on a GPU. A guess, not measured: that kept activations at the last are faster than
recomputed ones at the first, as recomputing takes a fifth of a pass by the roofline in docs/benchmarks.md."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Phases that some device goes through. resident: nothing has to leave a device between them; True as well on
    separate devices and on hosts without GPUs, where nothing is ever parked.

    problem: why the run does not fit, without a full stop; None when it fits. certain: whether the problem is beyond
    the planner's own error.
    """

    phases: tuple[Phase, ...]
    sampler: SamplerMemory
    resident: bool
    problem: str | None
    certain: bool

    @property
    def fits(self) -> bool:
        return self.problem is None


def fit_of(inputs: Inputs, assumed: Assumptions) -> Fit:
    """Phases, and the first problem with them."""
    load = workload_of(inputs, assumed)
    placement, learner = inputs.config.placement, learner_parts(inputs, assumed, load)
    sampler = sampler_memory(inputs, load) if placement.samplers else NO_SAMPLER
    limit, sampling = inputs.device.memory_bytes, {**sampler.parts, "sampler runtime": assumed.runtime_bytes}
    phases: tuple[Phase, ...]
    resident = True
    if not inputs.on_gpu:
        other = learner_parts(inputs, assumed, load, publishes=False)
        kinds = ((learner, 1), (other, placement.learner_ranks - 1), (sampling, placement.samplers))
        names = dict.fromkeys(name for parts, count in kinds if count for name in parts)
        total = {name: sum(count * parts.get(name, 0) for parts, count in kinds) for name in names}
        phases = (Phase("all processes", total, limit),)
    elif not inputs.shared:
        phases = (Phase("learner", learner, limit), Phase("sampler", sampling, limit))[: 1 + bool(placement.samplers)]
    else:
        both = Phase("learner and sampler", {**learner, **sampling}, limit)
        # Running out of memory costs a run, parking a second: both stay only where the learner may take MARGIN more.
        more = sum(learner.values()) * MARGIN
        resident = not limit or both.num_bytes + more <= limit
        phases = (both,) if resident else _alternating(assumed, learner, sampling, limit, released_parts(inputs))
    problem = _problem(inputs, phases, sampler)
    over = [phase.num_bytes / phase.limit for phase in phases if not phase.fits]
    return Fit(phases, sampler, resident, problem, problem is not None and max(over, default=math.inf) > 1 + MARGIN)


def settled(inputs: Inputs, assumed: Assumptions) -> Inputs:
    """Inputs with what is automatic: activations are kept where they fit a GPU's memory with MARGIN to spare, in the
    largest micro-batch that does; otherwise recomputed. Unchanged where the device's memory is not known."""
    recomputes, budget = inputs.config.model.gradient_checkpointing, inputs.config.learner.token_budget
    if "auto" not in (recomputes, budget) or not inputs.on_gpu or not inputs.device.memory_bytes:
        return inputs
    choices = [
        inputs.updated(model={"gradient_checkpointing": again}, learner={"token_budget": tokens})
        for again in ((False, True) if recomputes == "auto" else (recomputes,))
        for tokens in (TOKEN_BUDGETS if budget == "auto" else (budget,))
    ]
    return next((choice for choice in choices if _fits_well(fit_of(choice, assumed))), choices[-1])


def _fits_well(fit: Fit) -> bool:
    passes = [phase for phase in fit.phases if "activations" in phase.parts]
    return fit.fits and all(fit.resident or phase.num_bytes * (1 + MARGIN) <= phase.limit for phase in passes)


def _alternating(
    assumed: Assumptions, learner: Parts, sampling: Parts, limit: int, released: frozenset[str]
) -> tuple[Phase, ...]:
    """Shared devices whose phases alternate: the learner is parked while sampling, the sampler sleeps in the update,
    and a sync needs the weights of both, but nothing that only a pass needs (runtime.shared_devices)."""
    published = {name: size for name, size in learner.items() if name == "published weights"}
    held = {name: size for name, size in learner.items() if name not in released}
    weights = {"sampler weights": sampling["sampler weights"]}
    asleep = {"sampler asleep": assumed.runtime_bytes + sampling.get("CUDA graphs", 0)}
    return (
        Phase("sampling", {"runtime": assumed.runtime_bytes, **published, **sampling}, limit),
        Phase("update", {**learner, **asleep}, limit),
        Phase("sync", {**held, **weights, **asleep}, limit),
    )


def _problem(inputs: Inputs, phases: tuple[Phase, ...], sampler: SamplerMemory) -> str | None:
    if inputs.devices_needed > inputs.num_devices:
        needs = f"{inputs.devices_needed} GPUs (learner_ranks + samplers × tensor_parallel)"
        return f"placement needs {needs} and there are {inputs.num_devices}"
    for phase in phases:
        if not phase.fits:
            device = f"{inputs.device.name} has {gib(phase.limit)} GiB"
            return f"{phase.name}: needs {gib(phase.num_bytes)} GiB per device and {device}"
    if not sampler.longest_fits and (inputs.device.memory_bytes or not inputs.on_gpu):
        return (
            f"the sampler's KV cache has {gib(max(0, sampler.kv))} GiB, too little for one sequence of "
            f"model.max_length = {inputs.config.model.max_length} tokens"
        )
    return None


def gib(num_bytes: float) -> str:
    """GiB to one decimal."""
    return f"{num_bytes / GIB:.1f}"


def advise(inputs: Inputs, assumed: Assumptions) -> str:
    """One sentence: the problem, the first settings and values that solve it, or that none do."""
    problem = fit_of(inputs, assumed).problem
    for text, changed in _changes(inputs):
        if fit_of(changed, assumed).fits:
            return f"{problem}; set {text}"
    return f"{problem}; no setting makes it fit: use a device with more memory, more devices or a smaller model"


def _changes(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """What to set, and the inputs with it: first what leaves the result as it is, then what changes what is trained."""
    placement, learner = inputs.config.placement, inputs.config.learner
    spare = inputs.num_devices - placement.sampler_devices
    spare -= spare % learner.sequence_parallel
    most = inputs.config.rollout.prompts_per_step // learner.mini_batches * learner.sequence_parallel
    if inputs.on_gpu and not inputs.shared and 1 <= spare <= most:
        yield f"placement.learner_ranks = {spare}", inputs.updated(placement={"learner_ranks": spare})
    if inputs.on_gpu:
        for share in (0.6, 0.9, 0.3):
            text = f"rollout.gpu_memory_utilization = {share}"
            yield text, inputs.updated(rollout={"gpu_memory_utilization": share})
    else:
        size = -(-inputs.config.model.max_length * inputs.shape.kv_bytes(inputs.sampler_item) // GIB)
        yield f"rollout.cpu_kv_cache_gib = {size}", inputs.updated(rollout={"cpu_kv_cache_gib": size})
    recomputed = {"gradient_checkpointing": True}
    yield "model.gradient_checkpointing = true", inputs.updated(model=recomputed)
    yield "learner.zero_stage = 3", inputs.updated(learner={"zero_stage": 3})
    for budget in (4096, 2048, 1024, 512):
        if budget < learner.micro_batch_tokens:
            text = f"learner.zero_stage = 3, model.gradient_checkpointing = true and learner.token_budget = {budget}"
            yield text, inputs.updated(model=recomputed, learner={"zero_stage": 3, "token_budget": budget})
    if learner.lora is None:
        yield "learner.lora.rank = 16", inputs.updated(learner={"lora": LoraConfig(rank=16)})


class PlannedRule(BaseModel):
    """Cost of the run under one rule, with its look-ahead on to the end: an upper bound where a gate can fire."""

    label: str = Field(examples=["GXPO K=5"])
    own: bool = Field(description="Whether it is the run's rule.")
    backward_passes_per_step: int
    seconds: PlannedSeconds
    steps: int | None = Field(description="To the first bound of the budget; null where no number holds them.")
    backward_passes: int | None
    hours: float | None
    gpu_hours: float | None = Field(description="Null without GPUs.")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a run before it starts. advice: what to change when it does not fit, None when it fits."""

    inputs: Inputs
    assumed: Assumptions
    load: Workload
    fit: Fit
    advice: str | None
    rules: tuple[PlannedRule, ...]


def make_plan(inputs: Inputs, assumed: Assumptions | None = None) -> Plan:
    """The plan of a run. assumed: None for the defaults of its kind of device."""
    assumed = assumed or assumptions_for(inputs.device)
    inputs = settled(inputs, assumed)
    load = workload_of(inputs, assumed)
    fit = fit_of(inputs, assumed)
    own = inputs.config.learner.rule
    rules: list[RuleSettings] = []
    for kind in compared_rules():
        with suppress(ValidationError):
            rules.append(kind.adapted_from(own))
    if all(rule is not own for rule in rules):
        rules.append(own)
    costs = tuple(_rule_plan(inputs, assumed, load, rule) for rule in rules)
    return Plan(inputs, assumed, load, fit, None if fit.fits else advise(inputs, assumed), costs)


def refusal(plan: Plan) -> str | None:
    """The sentence that refuses a run that cannot fit; None for one that can, or might within the planner's error."""
    return plan.advice if plan.fit.certain else None


def _rule_plan(inputs: Inputs, assumed: Assumptions, load: Workload, rule: RuleSettings) -> PlannedRule:
    seconds = step_time(inputs, assumed, load, rule)
    per_step = rule.passes_per_step(gate_open=True)
    used = {
        "steps": 1,
        "backward_passes": per_step,
        "hours": seconds.step / 3600,
        "tokens": inputs.sequences * load.response,
    }
    bound = min(limit / used[name] for name, limit in inputs.config.budget.bounds.items())
    steps = max(1, math.ceil(bound - 1e-9)) if math.isfinite(bound) else None
    hours = None if steps is None else steps * seconds.step / 3600
    return PlannedRule(
        label=rule.label_of(rule.model_dump()),
        own=rule is inputs.config.learner.rule,
        backward_passes_per_step=per_step,
        seconds=seconds,
        steps=steps,
        backward_passes=None if steps is None else steps * per_step,
        hours=hours,
        gpu_hours=hours * inputs.devices_needed if hours is not None and inputs.on_gpu else None,
    )
