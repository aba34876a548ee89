"""Whether a run fits: every phase of every kind of device against its memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gxpo_trainer.planner.devices import Assumptions
from gxpo_trainer.planner.inputs import Inputs
from gxpo_trainer.planner.memory import Part, Phase, SamplerMemory, learner_parts, sampler_memory
from gxpo_trainer.planner.workload import workload_of

MARGIN = 0.15
"""Relative error of a learner's planned memory. A run that exceeds a device by less is warned about, not refused."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Phases that some device goes through. resident: nothing has to leave a device between them.

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
    limit, runtime = inputs.device.memory_bytes, Part("sampler runtime", assumed.runtime_bytes)
    sampling = (*sampler.parts(), runtime)
    phases: tuple[Phase, ...]
    resident = True
    if not inputs.on_gpu:
        others = learner_parts(inputs, assumed, load, publishes=False) * (inputs.learner_ranks - 1)
        phases = (Phase("all processes", _summed((*learner, *others, *sampling * inputs.samplers)), limit),)
    elif not inputs.shared:
        phases = (Phase("learner", learner, limit), Phase("sampler", sampling, limit))
    else:
        both = Phase("learner and sampler", (*learner, *sampling), limit)
        # Running out of memory costs a run, parking a second: both stay only where the learner may take MARGIN more.
        more = sum(part.num_bytes for part in learner) * MARGIN
        resident = not limit or both.num_bytes + more <= limit
        phases = (both,) if resident else _alternating(assumed, learner, sampler, sampling, limit)
    problem = _problem(inputs, phases, sampler)
    over = [phase.num_bytes / phase.limit for phase in phases if not phase.fits]
    return Fit(phases, sampler, resident, problem, problem is not None and max(over, default=math.inf) > 1 + MARGIN)


def _alternating(
    assumed: Assumptions, learner: tuple[Part, ...], sampler: SamplerMemory, sampling: tuple[Part, ...], limit: int
) -> tuple[Phase, ...]:
    """Shared devices whose phases alternate: the learner is parked while sampling, the sampler sleeps in the update,
    and a sync needs the weights of both (cluster.shared_devices)."""
    runtime = Part("runtime", assumed.runtime_bytes)
    published = tuple(part for part in learner if part.name == "published weights")
    asleep = Part("sampler asleep", assumed.runtime_bytes)
    held = tuple(part for part in learner if part.name not in ("activations", "logits"))
    weights = Part("sampler weights", sampler.weights)
    return (
        Phase("sampling", (runtime, *published, *sampling), limit),
        Phase("update", (*learner, asleep), limit),
        Phase("sync", (*held, weights, asleep), limit),
    )


def _summed(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Parts of equal names as one."""
    sizes: dict[str, int] = {}
    for part in parts:
        sizes[part.name] = sizes.get(part.name, 0) + part.num_bytes
    return tuple(Part(name, size) for name, size in sizes.items())


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
