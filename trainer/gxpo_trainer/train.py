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
from gxpo_trainer.data.prompts import PromptSet, TokenizedPrompts, load_prompts, resolve_template, tokenize_prompts
from gxpo_trainer.engine.placement import Placement
from gxpo_trainer.errors import CheckpointError, ConfigError
from gxpo_trainer.exporters import make_exporters
from gxpo_trainer.identity import run_identity
from gxpo_trainer.models.load import load_tokenizer, resolve_model
from gxpo_trainer.progress import TrainingProgress
from gxpo_trainer.report import IDENTITY, RunReporter
from gxpo_trainer.verify.math import parse_gold

if TYPE_CHECKING:
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


def train_command(args: argparse.Namespace) -> int:
    """`gxpo train`: exit code 0 when the budget was reached; errors travel to the command line."""
    config = load_run(args.config, args.set)
    out_dir = args.out or Path("runs") / safe_name(config.name)
    ended = train_run(config, out_dir, resume=args.resume, loggers=args.log)
    print(f"{config.name}: ended by budget.{ended}; results in {out_dir}", file=sys.stderr)
    return 0


def train_run(
    config: RunConfig,
    out_dir: Path,
    *,
    resume: bool = False,
    loggers: Sequence[str] = (),
    progress: TrainingProgress | None = None,
) -> str:
    """Train one run into `out_dir`; returns the name of the bound that ended it.

    Raises ConfigError, DataError or CheckpointError before anything is started or written; TrainingError later.
    """
    prepared = prepare(config, out_dir, resume=resume)
    exporters = make_exporters(loggers, out_dir, run_name=config.name, config=config.model_dump(mode="json"))
    with (
        RunReporter(out_dir, exporters=exporters) as reporter,
        progress or TrainingProgress(config.budget, name=config.name) as shown,
    ):
        return _run(prepared, reporter, shown)


def prepare(config: RunConfig, out_dir: Path, *, resume: bool) -> Prepared:
    """Check the machine, the model, the data and the output folder; touches nothing."""
    placement = Placement.decide(config)
    if config.placement.tensor_parallel != 1:
        raise ConfigError("placement.tensor_parallel must be 1: a sampler split over GPUs cannot be read back whole")
    store = CheckpointStore(out_dir / CHECKPOINTS, config.checkpoint)
    checkpoint = _checkpoint_to_resume(store, config, out_dir) if resume else None
    if not resume and (out_dir / IDENTITY).exists():
        raise ConfigError(f"--out {out_dir} holds a run already; add --resume to continue it, or name another folder")
    model_folder = resolve_model(config.model)
    data = load_prompts(config.data, config.seed, gold_problem)
    tokenizer = load_tokenizer(config.model)
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
        tokenized_benchmarks(config, tokenizer),
        store,
        checkpoint,
    )


def tokenized_benchmarks(config: RunConfig, tokenizer: Any) -> list[TokenizedBenchmark]:
    """The benchmarks of `evaluation`, rendered. Raises ConfigError when a prompt does not fit the model."""
    from gxpo_trainer.evaluate import TokenizedBenchmark

    limit = config.evaluation.max_new_tokens or config.rollout.max_new_tokens
    found = []
    for name in config.evaluation.benchmarks:
        benchmark: Benchmark = load_benchmark(name, config.data, config.evaluation.num_problems, gold_problem)
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


def _checkpoint_to_resume(store: CheckpointStore, config: RunConfig, out_dir: Path) -> Checkpoint | None:
    if not (out_dir / IDENTITY).exists():
        raise CheckpointError(f"--resume: {out_dir} holds no run; leave --resume out to start one")
    checkpoint = store.latest()
    if checkpoint is not None:
        from gxpo_trainer.resume import check_same_run

        check_same_run(checkpoint, config, out_dir)
    return checkpoint


def _run(prepared: Prepared, reporter: RunReporter, progress: TrainingProgress) -> str:
    """Start Ray and the engines, drive the controller, leave no process behind."""
    import ray

    from gxpo_trainer.controller import Controller
    from gxpo_trainer.engine.collect import SampleCollector
    from gxpo_trainer.engine.placement import start_ray
    from gxpo_trainer.evaluate import Evaluator
    from gxpo_trainer.rollouts import RolloutPlanner

    config = prepared.config
    ours = start_ray(prepared.placement)
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
    )
    if prepared.checkpoint is not None:
        controller.attempt = collector.attempt = int(prepared.checkpoint.state["attempt"]) + 1
    try:
        _write_identity(prepared, reporter)
        progress.message("starting sampler and learner")
        ended = controller.run(prepared.checkpoint)
        reporter.log_event("finished", f"budget.{ended} is reached", bound=ended)
        return ended
    except KeyboardInterrupt:
        reporter.log_event("interrupted", "stopped from outside; --resume continues from the last checkpoint")
        raise
    except BaseException as error:
        reason = getattr(error, "reason", "training_error")
        reporter.log_event("failed", f"{type(error).__name__}: {error}", reason=reason)
        raise
    finally:
        controller.learners.close()
        collector.kill()
        if ours:
            ray.shutdown()


def _write_identity(prepared: Prepared, reporter: RunReporter) -> None:
    folder = Path(prepared.model_folder)
    identity = run_identity(
        prepared.config,
        data_sha256=prepared.data.sha256 | {b.benchmark.name: b.benchmark.sha256 for b in prepared.benchmarks},
        policy=folder if folder.is_dir() else None,
    )
    reporter.write_identity(identity)
    copy = prepared.out_dir / CONFIG_COPY
    partial = copy.with_suffix(".partial")
    partial.write_text(to_toml(prepared.config), encoding="utf-8")
    partial.replace(copy)
