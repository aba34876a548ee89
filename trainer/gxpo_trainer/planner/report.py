"""A plan as a JSON-serializable view, and as the text that `gxpo plan` prints."""

from __future__ import annotations

from dataclasses import asdict

from pydantic import BaseModel, Field

from gxpo_trainer.planner.devices import GIB
from gxpo_trainer.planner.plan import Plan, PlannedRule, gib, idle_devices

_PHASES = ("sampling", "verify", "passes", "look_ahead", "sync", "other")


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
        fits=plan.fits,
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
    verdict = "fits" if plan.fits else "does not fit"
    notes = [note[0].upper() + note[1:] + "." for note in (plan.advice, idle_devices(inputs)) if note]
    sections = [
        [f"{name} on {count}: {verdict}", *notes],
        _memory_lines(plan),
        _time_lines(plan),
        ["Assumptions", *(f"  {line}" for line in assumption_lines(plan))],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _memory_lines(plan: Plan) -> list[str]:
    lines = []
    for phase in plan.fit.phases:
        limit = f" of {gib(phase.limit)}" if phase.limit else ""
        where = "host" if not plan.inputs.on_gpu else "device"
        lines.append(f"Memory per {where}, {phase.name}: {size(phase.num_bytes)}{limit and limit + ' GiB'}")
        lines += [f"  {name:<24}{size(num_bytes):>12}" for name, num_bytes in phase.parts.items()]
    sampler = plan.fit.sampler
    lines.append(f"The KV cache of a sampler holds {sampler.sequences:,} sequences of mean length.")
    if plan.inputs.on_gpu and plan.inputs.shared:
        lines.append(
            "Learner and sampler stay on their shared devices."
            if plan.fit.resident
            else "Learner and sampler take turns on their shared devices: shards are parked while sampling."
        )
    return lines


def _time_lines(plan: Plan) -> list[str]:
    phases = (*_PHASES, "overlapped") if any(rule.seconds.overlapped for rule in plan.rules) else _PHASES
    head = ("Seconds per step", *phases, "step")
    lines = [_columns([word.replace("_", " ") for word in head])]
    for rule in plan.rules:
        parts = asdict(rule.seconds)
        row = [_marked(rule), *(seconds(parts[phase]) for phase in phases), seconds(rule.seconds.step)]
        lines.append(_columns(row))
    lines += ["", _columns(["Whole budget", "steps", "passes", "hours", "GPU hours"])]
    for rule in plan.rules:
        row = ["-" if n is None else f"{n:,}" for n in (rule.steps, rule.backward_passes)]
        row += ["-" if n is None else f"{n:,.2f}" for n in (rule.hours, rule.gpu_hours)]
        lines.append(_columns([_marked(rule), *row]))
    lines.append("With the look-ahead on to the end; without evaluation, checkpoints and start-up. * this run's rule.")
    return lines


def _marked(rule: PlannedRule) -> str:
    return f"  {rule.label}{' *' if rule.own else ''}"


def _columns(cells: list[str]) -> str:
    return f"{cells[0]:<22}" + "".join(f"{cell:>12}" for cell in cells[1:])


def assumption_lines(plan: Plan) -> list[str]:
    """What the plan assumes, one sentence a line."""
    inputs, load, assumed = plan.inputs, plan.load, plan.assumed
    shape, device = inputs.shape, inputs.device
    memory = f"{device.memory_bytes / GIB:.1f} GiB" if device.memory_bytes else "memory not known"
    observed = [f"environment: {load.observation:.0f} tokens more a response"] if inputs.observation_limit else []
    return [
        f"model: {shape.parameters:,} parameters, {shape.layers} layers of width {shape.hidden}, "
        f"{shape.vocabulary:,} tokens; {inputs.trainable:,} trainable",
        f"device: {device.name}, {memory}, {device.flops(inputs.precision) / 1e12:g} TFLOP/s in {inputs.precision}, "
        f"{device.memory_bandwidth / 1e9:g} GB/s memory, {device.link_bandwidth / 1e9:g} GB/s to other devices, "
        f"{device.host_bandwidth / 1e9:g} GB/s to the host",
        f"placement: {inputs.learner_ranks} learner ranks at ZeRO stage {inputs.zero_stage}, "
        f"{inputs.samplers} samplers, tensor_parallel {inputs.tensor_parallel}, weights by {inputs.transport}",
        f"micro-batches of {inputs.token_budget:,} tokens, activations "
        f"{'recomputed' if inputs.checkpointing else 'kept'}"
        + (f", sampler {'without' if inputs.eager else 'with'} CUDA graphs" if inputs.on_gpu else ""),
        f"lengths: mean prompt {load.prompt:.0f} and response {load.response:.0f} tokens "
        f"({assumed.prompt_fraction:.0%} and {load.response / inputs.response_limit:.0%} of their limits)",
        *observed,
        f"learner: {assumed.utilization:.0%} of the FLOP/s, {1e3 * assumed.micro_batch_s:.3g} ms a micro-batch",
        f"sampling: {assumed.sampling_efficiency:.0%} of bandwidth and FLOP/s, "
        f"{1e3 * assumed.decode_step_s:.3g} ms a decoding step, {1e6 * assumed.token_s:.3g} µs a token",
        f"fixed: {assumed.fixed_s:.2g} s each for scoring, sync and the rest of a step",
        f"memory: {size(assumed.runtime_bytes)} a process before the model, {size(assumed.engine_bytes)} of libraries, "
        f"{assumed.memory_factor:.2f} × the counted bytes",
        "lengths and factors are guesses for this kind of device; only sizes are counted",
    ]


def size(num_bytes: float) -> str:
    """`1.5 GiB`, `12 MiB`."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.0f} MiB"


def seconds(value: float) -> str:
    """Three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
