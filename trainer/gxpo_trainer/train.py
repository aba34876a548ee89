"""A whole run from a config: check everything first, then start the engines, train, and clean up."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gxpo_trainer.checkpoint import Checkpoint, CheckpointStore
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config_io import load_run, to_toml
from gxpo_trainer.data.benchmarks import Benchmark, load_benchmark
from gxpo_trainer.data.contamination import without_contamination
from gxpo_trainer.data.prompts import PromptSet, TokenizedPrompts, load_prompts, resolve_template, tokenize_prompts
from gxpo_trainer.engine.placement import Placement
from gxpo_trainer.engine.verifier import check_rewards
from gxpo_trainer.errors import CheckpointError, ConfigError
from gxpo_trainer.exporters import make_exporters
from gxpo_trainer.identity import run_identity
from gxpo_trainer.launch import Launch
from gxpo_trainer.models.load import load_tokenizer, resolve_model
from gxpo_trainer.progress import TrainingProgress
from gxpo_trainer.report import IDENTITY, RunReporter
from gxpo_trainer.resume import check_same_run, next_attempt, repeated_passes
from gxpo_trainer.uploader import read_service
from gxpo_trainer.verify.math import parse_gold

if TYPE_CHECKING:
    from gxpo_trainer.controller import Controller
    from gxpo_trainer.evaluate import TokenizedBenchmark

CHECKPOINTS = "checkpoints"
CONFIG_COPY = "config.toml"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that has passed every check that needs no engine."""

    config: RunConfig
    out_dir: Path
    placement: Placement
    model_folder: str
    data: PromptSet
    prompts: TokenizedPrompts
    benchmarks: Sequence[TokenizedBenchmark]
    store: CheckpointStore
    checkpoint: Checkpoint | None
    skipped: Sequence[str]
    """Why newer checkpoints were passed over."""


def train_command(args: argparse.Namespace) -> int:
    """`gxpo train`: exit code 0 when the budget was reached or a wish granted; errors travel to the command line."""
    service = read_service(args.service) if args.service else None
    if service is not None and args.out is None:
        raise ConfigError("--service needs --out: the folder that the service made for the run")
    # A service has made the folder and must learn of a config that is refused; without one nothing is made for it.
    config = load_run(args.config, args.set) if service is None else None
    with Launch(args.out or Path("runs") / safe_name(config.name if config else ""), service) as launch:
        config = config or load_run(args.config, args.set)
        ended = _train(config, launch, resume=args.resume, go_on=args.go_on, loggers=args.log)
    print(f"{config.name}: {_how(ended, launch)}; results in {launch.out_dir}", file=sys.stderr)
    return launch.exit_code


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
        ended = _train(config, launch, resume=resume, loggers=loggers, progress=progress)
    if launch.exit_code:
        print(f"{config.name}: {_how(ended, launch)}", file=sys.stderr)
        raise SystemExit(launch.exit_code)
    return ended


def _train(
    config: RunConfig,
    launch: Launch,
    *,
    resume: bool = False,
    go_on: bool = False,
    loggers: Sequence[str] = (),
    progress: TrainingProgress | None = None,
) -> str:
    """Check everything, then run; the bound or the wish that ended it."""
    out_dir = launch.out_dir
    prepared = prepare(config, out_dir, resume=resume, go_on=go_on)
    exporters = make_exporters(loggers, out_dir, run_name=config.name, config=config.model_dump(mode="json"))
    with (
        RunReporter(out_dir, exporters=exporters) as reporter,
        progress or TrainingProgress(config.budget, name=config.name) as shown,
    ):
        launch.begin(reporter)
        ended = _run(prepared, launch, reporter, shown)
    launch.end(ended)
    return ended


def _how(ended: str, launch: Launch) -> str:
    if launch.exit_code:
        return "stopped by SIGTERM; --resume continues from the last checkpoint"
    return {"pause": "paused", "cancel": "cancelled"}.get(ended, f"ended by budget.{ended}")


def prepare(config: RunConfig, out_dir: Path, *, resume: bool, go_on: bool = False) -> Prepared:
    """Check the machine, the model, the data and the output folder; touches nothing.

    resume: the folder must hold a run, whose newest checkpoint must be whole. go_on: it may hold one, which goes on
    from its newest whole checkpoint, or from the start.
    """
    placement = Placement.decide(config)
    if config.placement.tensor_parallel != 1:
        raise ConfigError("placement.tensor_parallel must be 1: a sampler split over GPUs cannot be read back whole")
    store = CheckpointStore(out_dir / CHECKPOINTS, config.checkpoint)
    checkpoint, skipped = _checkpoint_to_resume(store, config, out_dir, resume=resume, go_on=go_on)
    if not (resume or go_on) and (out_dir / IDENTITY).exists():
        raise ConfigError(f"--out {out_dir} holds a run already; add --resume to continue it, or name another folder")
    model_folder = resolve_model(config.model)
    check_rewards(config.verifier)
    tokenizer = load_tokenizer(config.model)
    benchmarks = tokenized_benchmarks(config, tokenizer)
    data = without_contamination(
        load_prompts(config.data, config.seed, gold_problem),
        {b.benchmark.name: (*b.benchmark.prompts, *b.benchmark.left_out) for b in benchmarks},
        config.data.contamination,
    )
    longest = min(config.data.max_prompt_tokens, config.model.max_length - config.rollout.max_new_tokens)
    template = resolve_template(config.data.template, config.data.source)
    prompts = tokenize_prompts(data.prompts, tokenizer, template, longest)
    return Prepared(
        config,
        out_dir,
        placement,
        model_folder,
        data,
        prompts,
        benchmarks,
        store,
        checkpoint,
        skipped,
    )


def tokenized_benchmarks(config: RunConfig, tokenizer: Any) -> list[TokenizedBenchmark]:
    """The benchmarks of `evaluation`, rendered. Raises ConfigError when a prompt does not fit the model."""
    from gxpo_trainer.evaluate import TokenizedBenchmark

    limit = config.evaluation.max_new_tokens or config.rollout.max_new_tokens
    found = []
    for name in config.evaluation.benchmarks:
        benchmark: Benchmark = load_benchmark(name, config.data, config.evaluation, gold_problem)
        if any(benchmark.name == other.benchmark.name for other in found):
            raise ConfigError(f"evaluation.benchmarks: two are called {benchmark.name}; rename the file of one")
        fitted = tokenize_prompts(benchmark.prompts, tokenizer, benchmark.template, config.model.max_length - limit)
        if fitted.num_too_long:
            raise ConfigError(
                f"evaluation.benchmarks: {fitted.num_too_long} prompts of {name} leave no room for {limit} new tokens "
                f"in model.max_length = {config.model.max_length}; raise it or lower evaluation.max_new_tokens"
            )
        found.append(TokenizedBenchmark(benchmark, fitted.token_ids))
    return found


def gold_problem(gold: str) -> str | None:
    """Why a gold cannot be used, None when it can."""
    try:
        parse_gold(gold)
    except ValueError as error:
        return str(error)
    return None


def safe_name(name: str) -> str:
    """A folder name from a run's name: letters, digits, dot, dash and underscore; never hidden, never a path."""
    kept = "".join(c if c.isalnum() or c in "._-" else "-" for c in name).lstrip(".")
    return kept or "run"


def _checkpoint_to_resume(
    store: CheckpointStore, config: RunConfig, out_dir: Path, *, resume: bool, go_on: bool
) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from, None for the start; and why newer ones were passed over."""
    if resume and not (out_dir / IDENTITY).exists():
        raise CheckpointError(f"--resume: {out_dir} holds no run; leave --resume out to start one")
    skipped: list[str] = []
    if resume:
        checkpoint = store.latest()
    elif go_on and (out_dir / IDENTITY).exists():
        checkpoint, skipped = store.latest_valid()
    else:
        checkpoint = None
    if checkpoint is not None:
        check_same_run(checkpoint, config, out_dir)
    return checkpoint, skipped


def _run(prepared: Prepared, launch: Launch, reporter: RunReporter, progress: TrainingProgress) -> str:
    """Start Ray and the engines, drive the controller, leave no process behind."""
    import ray

    from gxpo_trainer.engine.placement import start_ray

    ours, controller = False, None
    try:
        ours = start_ray(prepared.placement)
        launch.watch_sigterm()
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
            controller.collector.kill()
        prepared.placement.seats.release()
        if ours:
            ray.shutdown()


def _controller(prepared: Prepared, launch: Launch, reporter: RunReporter, progress: TrainingProgress) -> Controller:
    """The controller of a new attempt; nothing of it runs yet."""
    from gxpo_trainer.controller import Controller, Counters
    from gxpo_trainer.engine.collect import SampleCollector
    from gxpo_trainer.evaluate import Evaluator
    from gxpo_trainer.rollouts import RolloutPlanner

    config = prepared.config
    collector = SampleCollector(config, prepared.placement, prepared.model_folder, reporter.log_event)
    controller = Controller(
        config,
        prepared.placement,
        collector,
        RolloutPlanner(config, prepared.prompts.prompts, prepared.prompts.token_ids),
        Evaluator(config, prepared.benchmarks),
        reporter,
        prepared.store,
        progress,
        launch.wish,
    )
    controller.attempt = collector.attempt = next_attempt(prepared.out_dir, prepared.checkpoint)
    controller.counters = Counters(repeated_passes=repeated_passes(prepared.out_dir, prepared.checkpoint))
    return controller


def _record_data(data: PromptSet, reporter: RunReporter) -> None:
    """What was left out of the training problems, and what a person should read before the scores are believed."""
    for setting, number in data.num_left_out.items():
        reporter.log_event("problems_left_out", f"{setting} took out {number} training problems", setting=setting)
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
        reporter.log_event("paused", "paused as was asked; --continue goes on from the last checkpoint")
    elif ended == "cancel":
        reporter.log_event("cancelled", "cancelled as was asked")
    else:
        reporter.log_event("finished", f"budget.{ended} is reached", bound=ended)


def _write_identity(prepared: Prepared, launch: Launch, reporter: RunReporter) -> None:
    folder = Path(prepared.model_folder)
    identity = run_identity(
        prepared.config,
        data_sha256=prepared.data.sha256 | {b.benchmark.name: b.benchmark.sha256 for b in prepared.benchmarks},
        policy=folder if folder.is_dir() else None,
    )
    reporter.write_identity(identity)
    if launch.serves:  # the service keeps the run's config itself
        return
    copy = prepared.out_dir / CONFIG_COPY
    partial = copy.with_suffix(".partial")
    partial.write_text(to_toml(prepared.config), encoding="utf-8")
    partial.replace(copy)
