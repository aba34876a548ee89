"""From inputs to a plan: whether every phase fits its device, what to change if not, seconds and cost of the budget.

Advice follows from the counted memory: settings are tried in order until one makes the run fit, first those that leave
the result as it is (placement, ZeRO, checkpointing, token budget, the sampler's memory), then precision and LoRA.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from pydantic import BaseModel, Field, ValidationError

from gxpo_trainer.config import RuleSettings
from gxpo_trainer.config.engines import TOKEN_BUDGET
from gxpo_trainer.config.rules import compared_rules
from gxpo_trainer.planner.devices import Assumptions, assumptions_for
from gxpo_trainer.planner.inputs import Inputs, Reference, Workload, workload_of
from gxpo_trainer.planner.memory import Parts, Phase, SamplerMemory, learner_parts, released_parts, sampler_memory
from gxpo_trainer.planner.timing import PlannedSeconds, step_time

MARGIN = 0.15
"""Relative error of a learner's planned memory. A run that exceeds a device by less is warned about, not refused."""
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
    learner, sampler = learner_parts(inputs, assumed, load), sampler_memory(inputs, load)
    limit, sampling = inputs.device.memory_bytes, {**sampler.parts, "sampler runtime": assumed.runtime_bytes}
    phases: tuple[Phase, ...]
    resident = True
    if not inputs.on_gpu:
        other = learner_parts(inputs, assumed, load, publishes=False)
        kinds = ((learner, 1), (other, inputs.learner_ranks - 1), (sampling, inputs.samplers))
        names = dict.fromkeys(name for parts, count in kinds if count for name in parts)
        total = {name: sum(count * parts.get(name, 0) for parts, count in kinds) for name in names}
        phases = (Phase("all processes", total, limit),)
    elif not inputs.shared:
        phases = (Phase("learner", learner, limit), Phase("sampler", sampling, limit))
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
    if not inputs.automatic or not inputs.on_gpu or not inputs.device.memory_bytes:
        return inputs
    keeps = (False, True) if "checkpointing" in inputs.automatic else (inputs.checkpointing,)
    budgets = TOKEN_BUDGETS if "token_budget" in inputs.automatic else (inputs.token_budget,)
    choices = [replace(inputs, checkpointing=again, token_budget=tokens) for again in keeps for tokens in budgets]
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
            f"model.max_length = {inputs.max_length} tokens"
        )
    return None


def gib(num_bytes: float) -> str:
    """GiB to one decimal."""
    return f"{num_bytes / 2**30:.1f}"


def advise(inputs: Inputs, assumed: Assumptions) -> str:
    """One sentence: the problem, the first settings and values that solve it, or that none do."""
    problem = fit_of(inputs, assumed).problem
    for text, changed in _changes(inputs):
        if fit_of(changed, assumed).fits:
            return f"{problem}; set {text}"
    return f"{problem}; no setting makes it fit: use a device with more memory, more devices or a smaller model"


def _changes(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """What to set, and the inputs with it: first what leaves the result as it is, then what changes what is trained."""
    spare = inputs.num_devices - inputs.sampler_devices
    if inputs.on_gpu and not inputs.shared and 1 <= spare <= inputs.prompts // inputs.mini_batches:
        yield f"placement.learner_ranks = {spare}", replace(inputs, learner_ranks=spare)
    if inputs.kv_bytes is not None:
        size = -(-inputs.max_length * inputs.shape.kv_bytes(inputs.sampler_item) // 2**30)
        yield f"rollout.cpu_kv_cache_gib = {size}", replace(inputs, kv_bytes=size * 2**30)
    else:
        for share in (0.6, 0.9, 0.3):
            yield f"rollout.gpu_memory_utilization = {share}", replace(inputs, memory_utilization=share)
    yield "model.gradient_checkpointing = true", replace(inputs, checkpointing=True)
    yield "learner.zero_stage = 3", replace(inputs, zero_stage=3)
    for budget in (4096, 2048, 1024, 512):
        if budget < inputs.token_budget:
            text = f"learner.zero_stage = 3, model.gradient_checkpointing = true and learner.token_budget = {budget}"
            yield text, replace(inputs, zero_stage=3, checkpointing=True, token_budget=budget)
    if inputs.adapter_rank is None:
        count = inputs.shape.adapter_parameters(16, ("q_proj", "k_proj", "v_proj", "o_proj"))
        reference: Reference = "none" if inputs.reference == "none" else "adapter"
        yield "learner.lora.rank = 16", replace(inputs, adapter_rank=16, trainable=count, reference=reference)


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

    @property
    def fits(self) -> bool:
        return self.fit.fits


def make_plan(inputs: Inputs, assumed: Assumptions | None = None) -> Plan:
    """The plan of a run. assumed: None for the defaults of its kind of device."""
    assumed = assumed or assumptions_for(inputs.device)
    inputs = settled(inputs, assumed)
    load = workload_of(inputs, assumed)
    fit = fit_of(inputs, assumed)
    own = inputs.rule
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
    bound = min(limit / used[name] for name, limit in inputs.budget.bounds.items())
    steps = max(1, math.ceil(bound - 1e-9)) if math.isfinite(bound) else None
    hours = None if steps is None else steps * seconds.step / 3600
    return PlannedRule(
        label=rule.label_of(rule.model_dump()),
        own=rule is inputs.rule,
        backward_passes_per_step=per_step,
        seconds=seconds,
        steps=steps,
        backward_passes=None if steps is None else steps * per_step,
        hours=hours,
        gpu_hours=hours * inputs.devices_needed if hours is not None and inputs.on_gpu else None,
    )
