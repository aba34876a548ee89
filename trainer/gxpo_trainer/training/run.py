"""A whole run from a config: check everything first, then start the engines, train, and clean up.

What the planner decides before a run's engines start: refusal, and whether shared GPUs hold everything at once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import to_toml
from gxpo_trainer.data.prompts import PromptSet
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner import fits_resident, inputs_of, make_plan, refusal
from gxpo_trainer.planner.devices import devices_of_cluster
from gxpo_trainer.planner.inputs import read_folder
from gxpo_trainer.reporting.exporters import make_exporters
from gxpo_trainer.reporting.identity import run_identity
from gxpo_trainer.reporting.reporter import RunReporter
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.progress import ProgressWatch, Watchdog
from gxpo_trainer.training.checkpoints import next_attempt, repeated_passes
from gxpo_trainer.training.launch import Launch
from gxpo_trainer.training.prepare import Prepared, prepare
from gxpo_trainer.training.progress import TrainingProgress

if TYPE_CHECKING:
    from gxpo_trainer.reporting.uploader import ControlRequest
    from gxpo_trainer.training.controller import Controller


def check_memory(placement: Placement, model_folder: str, cluster: Mapping[str, float]) -> None:
    """Raise ConfigError (`no_resources`) with the planner's sentence for a run that cannot fit, else set
    `placement.resident`.

    Where Ray's name for the GPUs stands for several memory sizes, a run is refused only when it fits none of them, and
    resident only when it is on all of them. Nothing is checked on CPUs, on GPUs that the planner does not know, and for
    models whose shape it cannot read; nor while the cluster has fewer GPUs than the run needs, because those that join
    may be of another kind.
    """
    config = placement.config
    devices = devices_of_cluster(cluster)
    if placement.device != "gpu" or not devices or cluster.get("GPU", 0) < placement.num_gpus:
        return
    try:
        shape = read_folder(Path(model_folder), config.model.path)
    except ConfigError:
        return
    plans = [make_plan(inputs_of(config, shape, device, placement.num_gpus)) for device in devices]
    placement.resident = all(fits_resident(plan) for plan in plans)
    sentences = [refusal(plan) for plan in plans]
    if None not in sentences:
        raise ConfigError(sentences[-1], reason="no_resources")


CONFIG_COPY = "config.toml"


def train_run(
    config: RunConfig,
    out_dir: Path,
    *,
    resume: bool = False,
    loggers: Sequence[str] = (),
    progress: TrainingProgress | None = None,
) -> str:
    """Train one run into `out_dir`; returns the name of the bound that ended it.

    Raises ConfigError, DataError or CheckpointError before anything is started or written; TrainingError later;
    SystemExit when SIGTERM ended the run, after its checkpoint.
    """
    with Launch(out_dir) as launch:
        ended = train_in_launch(config, launch, resume=resume, loggers=loggers, progress=progress)
    if launch.exit_code:
        print(f"{config.name}: {describe_end(ended, launch)}", file=sys.stderr)
        raise SystemExit(launch.exit_code)
    return ended


def train_in_launch(
    config: RunConfig,
    launch: Launch,
    *,
    resume: bool = False,
    continue_run: bool = False,
    loggers: Sequence[str] = (),
    progress: TrainingProgress | None = None,
) -> str:
    """Check everything, then run; returns the bound or the request that ended the run."""
    out_dir = launch.out_dir
    watch = ProgressWatch(config.timeouts)
    with Watchdog(watch, launch.end_stalled, launch.show_idle):
        prepared = prepare(config, out_dir, resume=resume, continue_run=continue_run)
        prepared.placement.group.watch = watch
        exporters = make_exporters(loggers, out_dir, run_name=config.name, config=config.model_dump(mode="json"))
        with (
            RunReporter(out_dir, exporters=exporters) as reporter,
            progress or TrainingProgress(config.budget, name=config.name) as shown,
        ):
            launch.begin(reporter)
            ended = _run(prepared, launch, reporter, shown)
    launch.end(ended)
    return ended


def describe_end(ended: str, launch: Launch) -> str:
    if launch.exit_code:
        return "stopped by SIGTERM; --resume continues from the last checkpoint"
    return {"pause": "paused", "cancel": "cancelled"}.get(ended, f"ended by budget.{ended}")


def _run(prepared: Prepared, launch: Launch, reporter: RunReporter, progress: TrainingProgress) -> str:
    """Start Ray and the engines, run the controller, and end all processes."""
    import ray

    from gxpo_trainer.runtime.ray_session import connect_ray

    ours, controller = False, None
    try:
        ours = connect_ray(prepared.placement)
        launch.watch_sigterm()
        request = _reserve(prepared, launch, reporter, progress, owned=ours)
        if request is not None:
            _record_end(request, launch, reporter)
            return request
        # Again: the GPUs of nodes that joined meanwhile are known now.
        check_memory(prepared.placement, prepared.model_folder, ray.cluster_resources())
        controller = _controller(prepared, launch, reporter, progress)
        reporter.attempt = controller.attempt
        _write_identity(prepared, launch, reporter)
        for problem in prepared.skipped:
            reporter.log_event("checkpoint_skipped", problem)
        _record_data(prepared.data, reporter)
        progress.message("starting sampler and learner")
        ended = controller.run(prepared.checkpoint)
        _record_end(ended, launch, reporter)
        return ended
    except (KeyboardInterrupt, SystemExit):
        reporter.log_event("interrupted", "stopped from outside; --resume continues from the last checkpoint")
        raise
    except BaseException as error:
        reason = launch.fail(error, setting_up=controller is None or not controller.ready)
        kind = "failed" if launch.fenced is None else "taken_over"
        reporter.log_event(kind, f"{type(error).__name__}: {error}", reason=reason)
        raise
    finally:
        if controller is not None:
            controller.learners.close()
            controller.pool.kill()
        prepared.placement.group.remove()
        if ours:
            ray.shutdown()


class _StoppedWaiting(Exception):
    """A pause or cancel request arrived before the run's resources."""


def _reserve(
    prepared: Prepared, launch: Launch, reporter: RunReporter, progress: TrainingProgress, *, owned: bool
) -> ControlRequest | None:
    """Reserve the run's resources, and report what it waits for; the request that ended the wait, else None."""
    from gxpo_trainer.runtime.ray_session import reserve

    placement = prepared.placement
    request: ControlRequest | None = None

    def on_wait(missing: str) -> None:
        nonlocal request
        placement.group.watch.progressed()  # placement.wait_s bounds this wait
        if (phase := f"waiting for {missing}") != launch.phase:
            launch.enter_phase(phase)
            reporter.log_event("waiting", phase)
            progress.message(phase)
        if (request := launch.control_request()) is not None:
            raise _StoppedWaiting

    try:
        reserve(
            placement,
            owned=owned,
            on_wait=on_wait,
            before_request=lambda cluster: check_memory(placement, prepared.model_folder, cluster),
        )
    except _StoppedWaiting:
        return request
    reporter.log_event("device", f"device {placement.device}: {placement.device_reason}", device=placement.device)
    if placement.colocated:
        shared = f"share {placement.num_gpus} GPUs" if placement.device == "gpu" else "take turns on the CPUs"
        reporter.log_event("colocated", f"learner and engines {shared}")
    return None


def _controller(prepared: Prepared, launch: Launch, reporter: RunReporter, progress: TrainingProgress) -> Controller:
    """The controller of a new attempt, not yet started."""
    from gxpo_trainer.rollout.pool import RolloutPool
    from gxpo_trainer.rollout.sources import RolloutPlanner
    from gxpo_trainer.training.controller import Controller, Counters
    from gxpo_trainer.training.evaluation import Evaluator

    config = prepared.config
    pool = RolloutPool(config, prepared.placement, prepared.model_folder, reporter.log_event)
    controller = Controller(
        config,
        prepared.placement,
        pool,
        RolloutPlanner(config, prepared.prompts.prompts, prepared.prompts.token_ids),
        Evaluator(config, prepared.benchmarks),
        reporter,
        prepared.store,
        progress,
        launch.control_request,
        launch.enter_phase,
    )
    controller.attempt = pool.engines.attempt = next_attempt(prepared.out_dir, prepared.checkpoint)
    controller.counters = Counters(repeated_passes=repeated_passes(prepared.out_dir, prepared.checkpoint))
    return controller


def _record_data(data: PromptSet, reporter: RunReporter) -> None:
    """Record excluded training problems, and near duplicates of evaluated ones for the user to check."""
    for setting, number in data.num_left_out.items():
        reporter.log_event("problems_left_out", f"{setting} excluded {number} training problems", setting=setting)
    if data.near_duplicates:
        examples = "; ".join(data.near_duplicates[:5])
        message = (
            f"{len(data.near_duplicates)} training problems are near duplicates of evaluated ones, such as: {examples}"
        )
        reporter.log_event("near_duplicates", message, problems=list(data.near_duplicates))


def _record_end(ended: str, launch: Launch, reporter: RunReporter) -> None:
    if ended == "pause" and launch.terminated:
        reporter.log_event("interrupted", "stopped by SIGTERM; --resume continues from the last checkpoint")
    elif ended == "pause":
        reporter.log_event("paused", "paused on request; --continue resumes from the last checkpoint")
    elif ended == "cancel":
        reporter.log_event("cancelled", "cancelled on request")
    else:
        reporter.log_event("finished", f"budget.{ended} is reached", bound=ended)


def _write_identity(prepared: Prepared, launch: Launch, reporter: RunReporter) -> None:
    identity = run_identity(
        prepared.config,
        data_sha256=prepared.data.sha256 | {b.benchmark.name: b.benchmark.sha256 for b in prepared.benchmarks},
        policy_sha256=prepared.policy_sha256,
    )
    reporter.write_identity(identity)
    if launch.serves:  # the service stores the config
        return
    copy = prepared.out_dir / CONFIG_COPY
    partial = copy.with_suffix(".partial")
    partial.write_text(to_toml(prepared.config), encoding="utf-8")
    partial.replace(copy)
