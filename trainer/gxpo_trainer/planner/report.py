"""A plan as a JSON-serializable view, and as the text that `gxpo plan` prints."""

from __future__ import annotations

from pydantic import BaseModel, Field

from gxpo_client.formats import number_of
from gxpo_trainer.planner.devices import GIB
from gxpo_trainer.planner.plan import Plan, PlannedRule, gib


class PlannedPart(BaseModel):
    """A share of a device's memory."""

    name: str = Field(examples=["optimizer"])
    bytes: int


class PlannedPhase(BaseModel):
    """What one device holds at a time."""

    phase: str = Field(examples=["learner"])
    needed_bytes: int
    limit_bytes: int | None = Field(description="Usable memory of the device; null where it is not known.")
    parts: list[PlannedPart]


class PlanView(BaseModel):
    """Expected memory, time and cost of a run."""

    device: str = Field(description="Kind of device that it is planned for.", examples=["h100-80"])
    num_devices: int
    devices_needed: int
    shared_devices: bool = Field(description="Whether learner and samplers are on the same devices.")
    resident: bool = Field(description="Whether nothing has to leave a shared device between phases.")
    fits: bool
    advice: str | None = Field(description="What to change; null when the run fits.")
    memory: list[PlannedPhase]
    kv_cache_bytes: int
    kv_cache_sequences: int = Field(description="Sequences of mean length in a sampler's cache.")
    rules: list[PlannedRule]
    assumptions: list[str]


def view_of(plan: Plan) -> PlanView:
    """Everything that a plan says, as values that JSON can represent."""
    inputs = plan.inputs
    return PlanView(
        device=inputs.device.name,
        num_devices=inputs.num_devices,
        devices_needed=inputs.devices_needed,
        shared_devices=inputs.shared,
        resident=plan.fit.resident,
        fits=plan.fit.fits,
        advice=plan.advice,
        memory=[
            PlannedPhase(
                phase=phase.name,
                needed_bytes=phase.num_bytes,
                limit_bytes=phase.limit or None,
                parts=[PlannedPart(name=name, bytes=num_bytes) for name, num_bytes in phase.parts.items()],
            )
            for phase in plan.fit.phases
        ],
        kv_cache_bytes=max(0, plan.fit.sampler.kv),
        kv_cache_sequences=plan.fit.sampler.sequences,
        rules=list(plan.rules),
        assumptions=assumption_lines(plan),
    )


def to_text(plan: Plan, name: str) -> str:
    """The plan for a terminal."""
    inputs = plan.inputs
    count = f"{inputs.num_devices} × {inputs.device.name}" if inputs.on_gpu else "this host (cpu)"
    lines = [f"{name} on {count}: {'fits' if plan.fit.fits else 'does not fit'}"]
    lines += [f"{plan.advice[0].upper()}{plan.advice[1:]}."] if plan.advice else []
    if inputs.on_gpu and (idle := inputs.num_devices - inputs.devices_needed) > 0:
        more = "placement.learner_ranks" + (" or placement.samplers" if inputs.config.placement.samplers else "")
        lines.append(f"{number_of(idle, 'GPU')} would be idle: raise {more}.")
    for phase in plan.fit.phases:
        limit = f" of {gib(phase.limit)} GiB" if phase.limit else ""
        where = "device" if inputs.on_gpu else "host"
        lines += ["", f"Memory per {where}, {phase.name}: {size(phase.num_bytes)}{limit}"]
        lines += [f"  {name:<24}{size(num_bytes):>12}" for name, num_bytes in phase.parts.items()]
    if inputs.config.placement.samplers:
        lines.append(f"The KV cache of a sampler holds {plan.fit.sampler.sequences:,} sequences of mean length.")
    if inputs.on_gpu and inputs.shared:
        how = "stay on" if plan.fit.resident else "take turns on"
        lines.append(f"Learner and sampler {how} their shared devices.")
    cells = ("Seconds", "sampling", "update", "step", "steps", "passes", "hours", "GPU hours")
    lines += ["", _columns(cells), *map(_rule_line, plan.rules)]
    first = f"the {steps} steps of warm_start, " if (steps := inputs.config.warm_steps) else ""
    left_out = f"without {first}evaluation, checkpoints and start-up"
    lines.append(f"With the look-ahead on to the end; {left_out}. * this run's rule.")
    return "\n".join([*lines, "", "Assumptions", *(f"  {line}" for line in assumption_lines(plan))])


def _rule_line(rule: PlannedRule) -> str:
    parts = rule.seconds
    times = [f"{part:,.3g}" for part in (parts.sampling, parts.passes + parts.look_ahead, parts.step)]
    counts = [(rule.steps, ",d"), (rule.backward_passes, ",d"), (rule.hours, ",.2f"), (rule.gpu_hours, ",.2f")]
    told = ("-" if number is None else format(number, form) for number, form in counts)
    return _columns((f"  {rule.label}{' *' if rule.own else ''}", *times, *told))


def _columns(cells: tuple[str, ...]) -> str:
    return f"{cells[0]:<22}" + "".join(f"{cell:>12}" for cell in cells[1:])


def assumption_lines(plan: Plan) -> list[str]:
    """What the plan assumes, one sentence a line."""
    inputs, load, assumed = plan.inputs, plan.load, plan.assumed
    shape, device = inputs.shape, inputs.device
    learner, placement = inputs.config.learner, inputs.config.placement
    memory = f"{device.memory_bytes / GIB:.1f} GiB" if device.memory_bytes else "memory not known"
    return [
        f"model: {shape.parameters:,} parameters, {inputs.trainable:,} trainable",
        f"device: {device.name}, {memory}, {device.flops(learner.precision) / 1e12:g} TFLOP/s in {learner.precision}, "
        f"{device.memory_bandwidth / 1e9:g} GB/s",
        f"placement: {number_of(placement.learner_ranks, 'learner rank')} at ZeRO stage {learner.zero_stage}, "
        f"{number_of(placement.samplers, 'sampler')}, tensor_parallel {placement.tensor_parallel}",
        f"micro-batches of {learner.micro_batch_tokens:,} tokens, activations "
        f"{'recomputed' if inputs.checkpointing else 'kept'}",
        f"lengths: mean prompt {load.prompt:.0f}, response {load.response:.0f} and environment {load.observation:.0f} "
        "tokens",
        f"speed: {assumed.utilization:.0%} of the FLOP/s in the learner, {assumed.sampling_efficiency:.0%} of FLOP/s "
        "and bandwidth in the sampler",
        f"memory: {size(assumed.runtime_bytes)} a process before the model, {size(assumed.engine_bytes)} of libraries, "
        f"{assumed.memory_factor:.2f} × the counted bytes",
        "lengths and factors are guesses for this kind of device; only sizes are counted",
    ]


def size(num_bytes: float) -> str:
    """`1.5 GiB`, `12 MiB`."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.0f} MiB"
