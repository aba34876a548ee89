"""A whole run from a config: check everything first, then start the engines, train, and clean up.

`build_runtime` makes every object that a run is made of, each given to the constructor of those that use it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import to_toml
from gxpo_trainer.data.chat import prompt_text, rendering
from gxpo_trainer.data.prompts import TokenizedPrompts, few_problems
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.jsonl import replace_file
from gxpo_trainer.learner.group import LearnerGroup
from gxpo_trainer.planner import inputs_of, make_plan, refusal
from gxpo_trainer.planner.devices import devices_of_cluster
from gxpo_trainer.planner.inputs import read_folder, read_shape
from gxpo_trainer.reporting.identity import run_identity
from gxpo_trainer.reporting.reading import CONFIG, IDENTITY
from gxpo_trainer.reporting.reporter import RunReporter
from gxpo_trainer.reporting.trackers import Trackers
from gxpo_trainer.rollout.engines import Engines
from gxpo_trainer.rollout.pool import RolloutPool
from gxpo_trainer.rollout.sources import AsyncRollouts, DatasetSource, OnPolicyRollouts, RolloutPlanner, RolloutSource
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.progress import ProgressWatch, Watchdog
from gxpo_trainer.runtime.ray_session import Event, cluster_resources, connect_ray, reserve
from gxpo_trainer.runtime.shared_devices import Devices, ResidentDevices, SharedDevices
from gxpo_trainer.training.checkpoints import changed_schedule, next_attempt, repeated_passes
from gxpo_trainer.training.controller import Controller, Runtime
from gxpo_trainer.training.evaluation import Evaluator
from gxpo_trainer.training.launch import ON_REQUEST, Launch
from gxpo_trainer.training.prepare import Prepared, prepare
from gxpo_trainer.training.progress import TrainingProgress


def train_run(config: RunConfig, out_dir: Path, *, resume: bool = False) -> str:
    """Train one run into `out_dir`; returns the name of the bound that ended it.

    Raises ConfigError, DataError or CheckpointError before anything is started or written; TrainingError later;
    SystemExit when SIGTERM ended the run, after its checkpoint if there was one to save.
    """
    with Launch(out_dir) as launch:
        ended = train_in_launch(config, launch, resume=resume)
    if launch.exit_code:
        print(f"{config.name}: {describe_end(ended, launch)}", file=sys.stderr)
        raise SystemExit(launch.exit_code)
    return ended


def train_in_launch(config: RunConfig, launch: Launch, *, resume: bool = False, continue_run: bool = False) -> str:
    """Check everything, then run; returns the bound or the request that ended the run."""
    out_dir = launch.out_dir
    watch = ProgressWatch(config.timeouts, interrupted=lambda: launch.terminated)
    with Watchdog(watch, launch.end_stalled, launch.show_idle):
        prepared = prepare(config, out_dir, resume=resume, continue_run=continue_run, watch=watch)
        progress = TrainingProgress(config.budget, name=config.name, warm_steps=config.warm_steps)
        with RunReporter(out_dir, show=partial(prompt_text, prepared.problems.tokenizer)) as reporter:
            launch.begin(reporter)
            record_data(prepared, reporter, progress.message)
            ended = _run(prepared, launch, reporter, progress)
    launch.end(ended)
    return ended


def describe_end(ended: str, launch: Launch) -> str:
    if launch.exit_code:
        return "stopped by SIGTERM; --resume continues from the last checkpoint"
    return ON_REQUEST.get(ended, f"ended by budget.{ended}")


def _run(prepared: Prepared, launch: Launch, reporter: RunReporter, progress: TrainingProgress) -> str:
    """Start Ray and the engines, run the controller, and end all processes."""
    owned = False
    runtime: Runtime | None = None
    controller: Controller | None = None
    config, checkpoint = prepared.config, prepared.checkpoint
    try:
        owned = connect_ray(prepared.placement)
        launch.watch_sigterm()
        placement = _reserve(prepared, launch, reporter, progress, owned=owned)
        attempt = next_attempt(prepared.out_dir, checkpoint, after=launch.after)
        runtime = build_runtime(
            config,
            placement,
            prepared.model_folder,
            prepared.problems.prompts,
            reporter.log_event,
            # Again: the GPUs of nodes that joined meanwhile are known now.
            fit=check_memory(placement, prepared.model_folder, cluster_resources()),
            rows=prepared.problems.rows,
            attempt=attempt,
        )
        controller = Controller(
            runtime,
            Evaluator(config, prepared.problems.benchmarks),
            reporter,
            prepared.store,
            progress,
            attempt=attempt,
            repeated_passes=repeated_passes(prepared.out_dir, checkpoint),
            control_request=launch.control_request,
            enter_phase=launch.enter_phase,
        )
        change = changed_schedule(config, prepared.out_dir) if checkpoint is not None else ""
        _write_identity(prepared, launch, reporter, attempt)
        for problem in prepared.skipped:
            reporter.log_event("checkpoint_skipped", problem)
        if change:
            reporter.log_event("schedule_changed", change)
            progress.message(change)
        progress.message(f"starting {'sampler and ' if config.needs_engines else ''}learner")
        with Trackers(prepared.out_dir, config.logging, partial(_tell, reporter, progress)) as trackers:
            ended = controller.run(checkpoint)
            trackers.status = "stopped" if ended in ("pause", "cancel") else "finished"
            if launch.terminated:
                trackers.finish_s = 5.0
        _record_end(ended, launch, reporter)
        return ended
    except _StoppedWaiting as stopped:
        (request,) = stopped.args
        _record_end(request, launch, reporter)
        return str(request)
    except (KeyboardInterrupt, SystemExit):
        reporter.log_event("interrupted", "stopped from outside; --resume continues from the last checkpoint")
        raise
    except BaseException as error:
        reason = launch.fail(error, setting_up=controller is None or not controller.ready)
        kind = "failed" if launch.fenced is None else "taken_over"
        reporter.log_event(kind, f"{type(error).__name__}: {error}", reason=reason)
        raise
    finally:
        if runtime is not None:
            runtime.close()
        prepared.placement.group.remove()
        if owned:
            ray.shutdown()


def _tell(reporter: RunReporter, progress: TrainingProgress, message: str) -> None:
    reporter.log_event("tracker", message)
    progress.message(message)


class _StoppedWaiting(Exception):
    """A pause or cancel request, its argument, arrived before the run's resources."""


def _reserve(
    prepared: Prepared, launch: Launch, reporter: RunReporter, progress: TrainingProgress, *, owned: bool
) -> Placement:
    """Reserve the run's resources, and report what it waits for. Raises _StoppedWaiting."""

    def on_wait(missing: str) -> None:
        prepared.placement.group.watch.progressed()  # placement.wait_s bounds this wait
        if (phase := f"waiting for {missing}") != launch.phase:
            launch.enter_phase(phase)
            reporter.log_event("waiting", phase)
            progress.message(phase)
        if (request := launch.control_request()) is not None:
            raise _StoppedWaiting(request)

    placement = reserve(
        prepared.placement,
        owned=owned,
        on_wait=on_wait,
        before_request=lambda placement, cluster: check_memory(placement, prepared.model_folder, cluster),
    )
    reporter.log_event("device", f"device {placement.device}: {placement.device_reason}", device=placement.device)
    reporter.log_event("cpus", placement.cpus_in_words, **placement.cpus._asdict())
    if placement.colocated:
        shared = f"share {placement.num_gpus} GPUs" if placement.device == "gpu" else "take turns on the CPUs"
        reporter.log_event("colocated", f"learner and engines {shared}")
    return placement


def record_data(prepared: Prepared, reporter: RunReporter, say: Callable[[str], None] = lambda line: None) -> None:
    """Record the first prompt, a restart without a checkpoint, excluded training problems, and too few problems for a
    step. `say` prints the restart and the latter too, and what is done without a chat template."""
    problems, config = prepared.problems, prepared.config
    sizes = [(len(problems.prompts.prompts), config.rollout.prompts_per_step, "rollout.prompts_per_step")]
    if config.warm_start is not None and problems.rows is not None:
        sizes.append((len(problems.rows.prompts), config.warm_start.rows_per_step, "warm_start.rows_per_step"))
    if prepared.checkpoint is None and (prepared.out_dir / IDENTITY).exists():
        restart = f"no {'valid checkpoint' if prepared.skipped else 'checkpoint yet'}: the run starts again from step 1"
        reporter.log_event("restarted", restart)
        say(restart)
    if prepared.checkpoint is None:
        first, longest = next(problems.shown()), 10_000
        reporter.log_event("prompt", first if len(first) <= longest else f"{first[:longest]}…")
    if not getattr(problems.tokenizer, "chat_template", None):
        say(f"prompts are {rendering(problems.tokenizer)}")
    for warning in filter(None, (few_problems(*size) for size in sizes)):
        reporter.log_event("few_problems", warning)
        say(warning)
    for setting, number in problems.data.num_left_out.items():
        reporter.log_event("problems_left_out", f"{setting} excluded {number} training problems", setting=setting)


def _record_end(ended: str, launch: Launch, reporter: RunReporter) -> None:
    if ended == "pause" and launch.terminated:
        reporter.log_event("interrupted", "stopped by SIGTERM; --resume continues from the last checkpoint")
    elif done := ON_REQUEST.get(ended):
        reporter.log_event(done, f"{done} on request")
    else:
        reporter.log_event("finished", f"budget.{ended} is reached", bound=ended)


def _write_identity(prepared: Prepared, launch: Launch, reporter: RunReporter, attempt: int) -> None:
    identity = run_identity(
        prepared.config,
        data_sha256=prepared.training_sha256
        | {b.benchmark.name: b.benchmark.sha256 for b in prepared.problems.benchmarks},
        policy_sha256=prepared.policy_sha256,
    )
    reporter.write_identity(identity, attempt, resumed=prepared.checkpoint is not None)
    if launch.serves:  # the service stores the config
        return
    replace_file(prepared.out_dir / CONFIG, to_toml(prepared.config))


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
        teacher = None if config.teacher is None else read_shape(config.teacher.path, "teacher.path")
    except ConfigError:
        return Fit()
    plans = [make_plan(inputs_of(config, shape, device, placement.num_gpus, teacher)) for device in devices]
    refusals = [sentence for sentence in map(refusal, plans) if sentence is not None]
    if len(refusals) == len(plans):
        raise ConfigError(refusals[-1], reason="no_resources")
    return Fit(
        resident=all(plan.fit.resident for plan in plans),
        recomputes=any(plan.inputs.checkpointing for plan in plans),
        token_budget=min(plan.inputs.config.learner.micro_batch_tokens for plan in plans),
    )


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
    planner = RolloutPlanner(config, prompts)
    sampled = AsyncRollouts(config, pool, planner) if config.rollout.async_depth else OnPolicyRollouts(pool, planner)
    rollouts: RolloutSource = sampled
    if rows is not None and config.warm_start is not None:
        rollouts = DatasetSource(config, pool, rows, config.warm_start.rows_per_step, after=sampled)
    elif rows is not None:
        rollouts = DatasetSource(config, pool, rows, config.rollout.prompts_per_step)
    return Runtime(config, learners, pool, planner, rollouts)
