"""What to change when a run does not fit: settings are tried in order until it does.

Settings that leave the result as it is come first (ZeRO, checkpointing, token budget), then those of the cluster, then
those that change the run (precision, LoRA).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gxpo_trainer.planner.devices import Assumptions
from gxpo_trainer.planner.fitting import fit_of
from gxpo_trainer.planner.inputs import Inputs, Reference

Change = tuple[str, Inputs]
"""What to set, and the inputs with it."""
Finder = Callable[[Inputs], Iterator[Change]]
MOST_CHANGES = 6


def advise(inputs: Inputs, assumed: Assumptions) -> str:
    """One sentence: the problem, the settings and values that solve it, or that none do."""
    problem = fit_of(inputs, assumed).problem
    for find in (_neutral, _any):
        changes = _single(inputs, assumed, find) or _pair(inputs, assumed, find) or _several(inputs, assumed, find)
        if changes:
            return f"{problem}; set {' and '.join(changes)}"
    return (
        f"{problem}; no value of learner.zero_stage, learner.token_budget or placement.learner_ranks makes it fit: "
        "use a device with more memory, more devices or a smaller model"
    )


def _single(inputs: Inputs, assumed: Assumptions, find: Finder) -> list[str]:
    return next(([text] for text, changed in find(inputs) if fit_of(changed, assumed).fits), [])


def _pair(inputs: Inputs, assumed: Assumptions, find: Finder) -> list[str]:
    """Two settings that fit together, though one alone may make things worse."""
    for first, changed in find(inputs):
        for second, both in find(changed):
            if _setting(first) != _setting(second) and fit_of(both, assumed).fits:
                return [first, second]
    return []


def _setting(change: str) -> str:
    return change.partition(" = ")[0]


def _several(inputs: Inputs, assumed: Assumptions, find: Finder) -> list[str]:
    """Changes applied one after the other, each only where it lowers the need; empty when they do not suffice."""
    chosen: dict[str, str] = {}
    current = inputs
    for _ in range(MOST_CHANGES):
        for text, changed in find(current):
            if _excess(changed, assumed) < _excess(current, assumed):
                chosen[_setting(text)] = text
                current = changed
                break
        else:
            return []
        if fit_of(current, assumed).fits:
            return list(chosen.values())
    return []


def _excess(inputs: Inputs, assumed: Assumptions) -> tuple[int, int, int]:
    """How far a run is from fitting; lower is nearer."""
    fit = fit_of(inputs, assumed)
    over = sum(max(0, phase.num_bytes - phase.limit) for phase in fit.phases if phase.limit)
    return max(0, inputs.devices_needed - inputs.num_devices), over, 0 if fit.sampler.longest_fits else 1


def _neutral(inputs: Inputs) -> Iterator[Change]:
    """Single settings that may help and leave the result as it is, the mildest first."""
    yield from _placements(inputs)
    yield from _learner(inputs)
    yield from _sampler(inputs)


def _any(inputs: Inputs) -> Iterator[Change]:
    """The same, and those that change what is trained."""
    yield from _neutral(inputs)
    if inputs.precision == "fp32" and inputs.zero_stage:
        yield 'learner.precision = "bf16"', replace(inputs, precision="bf16", sampler_item=2)
    if inputs.adapter_rank is None:
        targets = ("q_proj", "k_proj", "v_proj", "o_proj")
        count = inputs.shape.adapter_parameters(16, targets)
        reference: Reference = "none" if inputs.reference == "none" else "adapter"
        yield "learner.lora.rank = 16", replace(inputs, adapter_rank=16, trainable=count, reference=reference)


def _placements(inputs: Inputs) -> Iterator[Change]:
    """Other numbers of ranks: one for each spare device, or one for each of a sampler's, to share those."""
    most = inputs.prompts // inputs.mini_batches
    if not inputs.on_gpu or inputs.shared:
        return
    spare, engines = inputs.num_devices - inputs.sampler_devices, inputs.sampler_devices
    if 1 <= spare <= most and spare != inputs.learner_ranks:
        yield f"placement.learner_ranks = {spare}", replace(inputs, learner_ranks=spare)
    if not inputs.one_node or engines > most:
        return
    if inputs.colocate is False and inputs.learner_ranks == engines:
        yield 'placement.colocate = "auto"', replace(inputs, colocate="auto")
    if inputs.colocate == "auto" and inputs.learner_ranks != engines:
        yield f"placement.learner_ranks = {engines}", replace(inputs, learner_ranks=engines)


def _learner(inputs: Inputs) -> Iterator[Change]:
    if inputs.learner_ranks > 1 or inputs.zero_stage == 1:
        for stage in range(inputs.zero_stage + 1, 4):
            if stage != 1:
                yield f"learner.zero_stage = {stage}", replace(inputs, zero_stage=stage)
    if not inputs.checkpointing:
        yield "model.gradient_checkpointing = true", replace(inputs, checkpointing=True)
    budget = inputs.token_budget // 2
    while budget >= 512:
        yield f"learner.token_budget = {budget}", replace(inputs, token_budget=budget)
        budget //= 2


def _sampler(inputs: Inputs) -> Iterator[Change]:
    if inputs.on_gpu:
        for share in (0.6, 0.75, 0.9):
            if share > inputs.memory_utilization:
                yield f"rollout.gpu_memory_utilization = {share}", replace(inputs, memory_utilization=share)
        for share in (0.3, 0.2):
            if inputs.shared and share < inputs.memory_utilization:
                yield f"rollout.gpu_memory_utilization = {share}", replace(inputs, memory_utilization=share)
        for count in (2, 4, 8):
            if count > inputs.tensor_parallel and inputs.shape.heads % count == 0:
                yield f"placement.tensor_parallel = {count}", replace(inputs, tensor_parallel=count)
    elif inputs.kv_bytes is not None:
        token = inputs.shape.kv_bytes(inputs.sampler_item)
        size = -(-inputs.max_length * token // 2**30)
        if size * 2**30 > inputs.kv_bytes:
            yield f"rollout.cpu_kv_cache_gib = {size}", replace(inputs, kv_bytes=size * 2**30)
