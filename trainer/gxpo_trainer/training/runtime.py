"""One way to build a run: every object that it is made of, each given to the constructor of those that use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gxpo_trainer.config import RunConfig
from gxpo_trainer.data.prompts import TokenizedPrompts
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.learner.group import LearnerGroup
from gxpo_trainer.planner import inputs_of, make_plan, refusal
from gxpo_trainer.planner.devices import devices_of_cluster
from gxpo_trainer.planner.inputs import read_folder
from gxpo_trainer.rollout.engines import Engines, WeightSource
from gxpo_trainer.rollout.pool import RolloutPool
from gxpo_trainer.rollout.sources import AsyncRollouts, DatasetSource, OnPolicyRollouts, RolloutPlanner, RolloutSource
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.progress import ProgressWatch
from gxpo_trainer.runtime.ray_session import Event
from gxpo_trainer.runtime.shared_devices import Devices, ResidentDevices, SharedDevices


@dataclass(frozen=True, slots=True)
class Fit:
    """How a run fits on its GPUs.

    resident: shared ones hold learner and engines at once, so neither has to leave. recomputes, token_budget: what the
    planner decided where `model.gradient_checkpointing` and `learner.token_budget` are automatic, else their values;
    None where it knows nothing of the GPUs.
    """

    resident: bool = False
    recomputes: bool | None = None
    token_budget: int | None = None

    def decided(self, config: RunConfig) -> RunConfig:
        """The run's settings with these two."""
        if self.recomputes is None or self.token_budget is None:
            return config
        model, learner = {"gradient_checkpointing": self.recomputes}, {"token_budget": self.token_budget}
        return config.updated(model=model, learner=learner)


def check_memory(placement: Placement, model_folder: str, cluster: Mapping[str, float]) -> Fit:
    """How the run fits on GPUs of the cluster, by the planner. Raises ConfigError (`no_resources`) when it cannot.

    Where Ray's name for the GPUs stands for several memory sizes, a run is refused only when it fits none of them, and
    resident only when it is on all of them. Nothing is checked on CPUs, on GPUs that the planner does not know, and for
    models whose shape it cannot read; nor while the cluster has fewer GPUs than the run needs, because those that join
    may be of another kind.
    """
    config = placement.config
    devices = devices_of_cluster(cluster)
    if placement.device != "gpu" or not devices or cluster.get("GPU", 0) < placement.num_gpus:
        return Fit()
    try:
        shape = read_folder(Path(model_folder), config.model.path)
    except ConfigError:
        return Fit()
    plans = [make_plan(inputs_of(config, shape, device, placement.num_gpus)) for device in devices]
    refusals = [sentence for sentence in map(refusal, plans) if sentence is not None]
    if len(refusals) == len(plans):
        raise ConfigError(refusals[-1], reason="no_resources")
    return Fit(
        resident=all(plan.fit.resident for plan in plans),
        recomputes=any(plan.inputs.checkpointing for plan in plans),
        token_budget=min(plan.inputs.config.learner.micro_batch_tokens for plan in plans),
    )


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a run consists of while it trains. `close` ends its processes."""

    config: RunConfig
    learners: LearnerGroup
    pool: RolloutPool
    planner: RolloutPlanner
    rollouts: RolloutSource

    @property
    def watch(self) -> ProgressWatch:
        return self.pool.group.watch

    def close(self) -> None:
        self.learners.close()
        self.pool.kill()


def build_runtime(
    config: RunConfig,
    placement: Placement,
    model_folder: str,
    prompts: TokenizedPrompts,
    log_event: Event,
    *,
    fit: Fit,
    rows: TokenizedPrompts | None = None,
    attempt: int = 1,
) -> Runtime:
    """The parts of a run, none of them started. rows: with completions, where the run or its warm start is supervised.
    attempt: of the run, for the engines' seeds."""
    engines = Engines(config, placement, model_folder, log_event, attempt=attempt)
    if fit.recomputes is not None:
        log_event(
            "micro_batches",
            f"micro-batches of {fit.token_budget:,} tokens, activations {'recomputed' if fit.recomputes else 'kept'}",
        )

    def share(learners: LearnerGroup) -> Devices:
        if not placement.colocated:
            return Devices()
        if fit.resident:
            return ResidentDevices(engines)
        return SharedDevices(engines, learners, adapters=config.learner.lora is not None)

    # Asynchronous rollouts serve the engines while the learner works.
    learners = LearnerGroup(
        fit.decided(config), placement, wait_for_one=lambda calls, phase: rollouts.serve(calls, phase), share=share
    )
    pool = RolloutPool(config, engines, source=learners, devices=learners.devices)
    planner = RolloutPlanner(config, prompts.prompts, prompts.token_ids)
    sampled = AsyncRollouts(config, pool, planner) if config.rollout.async_depth else OnPolicyRollouts(pool, planner)
    rollouts: RolloutSource = sampled
    if rows is not None and config.warm_start is not None:
        rollouts = DatasetSource(config, pool, rows, config.warm_start.rows_per_step, after=sampled)
    elif rows is not None:
        rollouts = DatasetSource(config, pool, rows, config.rollout.prompts_per_step)
    return Runtime(config, learners, pool, planner, rollouts)


def build_pool(
    config: RunConfig, placement: Placement, model_folder: str, log_event: Event, *, source: WeightSource | None = None
) -> RolloutPool:
    """A pool without a learner group. source: of its weights; None: it keeps version 0, that of the model folder."""
    engines = Engines(config, placement, model_folder, log_event, initial_version=None if source else 0)
    return RolloutPool(config, engines, source=source)
