"""Every check of a run that needs no engine: machine, model, data, output folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gxpo_trainer.config import DataConfig, RunConfig
from gxpo_trainer.data.benchmarks import Benchmark, load_benchmark, without_contamination
from gxpo_trainer.data.chat import ObservationEncoder, chat_template_problem
from gxpo_trainer.data.prompts import (
    PromptSet,
    TokenizedPrompts,
    load_prompts,
    resolve_template,
    tokenize_completions,
    tokenize_prompts,
)
from gxpo_trainer.environments.host import check_environment
from gxpo_trainer.errors import CheckpointError, ConfigError
from gxpo_trainer.grading.verify import parse_gold
from gxpo_trainer.learner.models import check_tensor_parallel, load_tokenizer, pin_revision, resolve_model
from gxpo_trainer.learner.setup import check_attention
from gxpo_trainer.reporting.identity import hash_path
from gxpo_trainer.reporting.reading import IDENTITY
from gxpo_trainer.rollout.requests import EpisodeStart
from gxpo_trainer.rollout.verification import check_rewards
from gxpo_trainer.runtime.placement import Placement, ray_address
from gxpo_trainer.runtime.progress import ProgressWatch
from gxpo_trainer.runtime.ray_session import check_machine
from gxpo_trainer.training.checkpoints import CHECKPOINTS, Checkpoint, CheckpointStore, check_same_model, check_same_run
from gxpo_trainer.types import Prompt


@dataclass(frozen=True, slots=True)
class TokenizedBenchmark:
    """A benchmark with its prompts rendered for one tokenizer. token_ids: int32[length] each.

    left_out_ids: those of `benchmark.left_out`, for a full evaluation; empty where none will be made.
    """

    benchmark: Benchmark
    token_ids: Sequence[npt.NDArray[np.int32]]
    left_out_ids: Sequence[npt.NDArray[np.int32]] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that has passed every check that needs no engine."""

    config: RunConfig
    out_dir: Path
    placement: Placement
    model_folder: str
    policy_sha256: str
    data: PromptSet
    prompts: TokenizedPrompts
    rows: TokenizedPrompts | None
    """Those of a supervised run or of a warm start, with their completions."""
    benchmarks: Sequence[TokenizedBenchmark]
    store: CheckpointStore
    checkpoint: Checkpoint | None
    skipped: Sequence[str]
    """Why newer checkpoints were skipped."""


def prepare(
    config: RunConfig,
    out_dir: Path,
    *,
    resume: bool = False,
    continue_run: bool = False,
    watch: ProgressWatch | None = None,
) -> Prepared:
    """Check the machine, the model, the data and the output folder, without writing anything.

    resume: the folder must contain a run with a valid newest checkpoint. continue_run: it may contain one, which
    resumes from its newest valid checkpoint, or from the start. watch: notices processes that make no progress.
    """
    placement = Placement.decide(config, watch)
    check_machine(placement)
    if not (resume or continue_run) and (out_dir / IDENTITY).exists():
        raise ConfigError(f"--out {out_dir} already contains a run; add --resume, or choose another folder")
    config = config.model_copy(update={"model": pin_revision(config.model)})
    placement = replace(placement, config=config.without_idle_engines())
    store = CheckpointStore(out_dir / CHECKPOINTS, config.checkpoint)
    checkpoint, skipped = _checkpoint_to_resume(store, config, out_dir, resume=resume, continue_run=continue_run)
    model_folder = resolve_model(config.model)
    policy_sha256 = hash_path(Path(model_folder))
    if checkpoint is not None:
        check_same_model(checkpoint, config, out_dir, policy_sha256)
    if config.placement.device != "auto" or ray_address(config) is None:
        check_attention(config, placement.device)
    check_tensor_parallel(Path(model_folder), config.placement.tensor_parallel)
    check_rewards(config.verifier)
    tokenizer = load_tokenizer(config.model)
    check_conversations(config, tokenizer)
    benchmarks = tokenized_benchmarks(config, tokenizer)
    evaluated = {b.benchmark.name: (*b.benchmark.prompts, *b.benchmark.left_out) for b in benchmarks}
    template = resolve_template(config.data.template, config.data.source)
    rows: TokenizedPrompts | None = None
    if config.rollout.source == "dataset":
        data, rows = supervised_rows(config, config.data, tokenizer, evaluated)
        prompts = rows
    else:
        data = without_contamination(
            load_prompts(config.data, config.seed, gold_problem), evaluated, config.data.contamination
        )
        data, prompts = fitting_prompts(config, data, tokenizer, template)
        if config.warm_start is not None:
            taught, rows = supervised_rows(config, config.warm_start.data or config.data, tokenizer, evaluated)
            left_out = {**taught.num_left_out, **data.num_left_out}
            data = replace(data, sha256={**taught.sha256, **data.sha256}, num_left_out=left_out)
    start = EpisodeStart.of(prompts.prompts[0], template, config.seed)
    check_environment(config.environment, start.problem, start.seed)
    return Prepared(
        config,
        out_dir,
        placement,
        model_folder,
        policy_sha256,
        data,
        prompts,
        rows,
        benchmarks,
        store,
        checkpoint,
        skipped,
    )


def prompt_limit(config: RunConfig, section: str, max_new_tokens: int) -> tuple[int, str, str]:
    """Tokens of the model's length that responses leave for a prompt, what that follows from, and how to enlarge it.

    section: that of the setting `max_new_tokens`.
    """
    observed = config.environment.observation_tokens
    written = " − what environment turns write" if observed else ""
    return (
        config.model.max_length - max_new_tokens - observed,
        f"model.max_length − {section}.max_new_tokens{written}",
        f"raise model.max_length or lower {section}.max_new_tokens",
    )


def fitting_prompts(
    config: RunConfig, data: PromptSet, tokenizer: Any, template: str
) -> tuple[PromptSet, TokenizedPrompts]:
    """The training prompts within the limit, rendered, and `data` with the number of longer ones.

    Raises DataError when none is left, with the setting that limits them.
    """
    longest, setting, fix = min(
        (config.data.max_prompt_tokens, "data.max_prompt_tokens", "raise it"),
        prompt_limit(config, "rollout", config.rollout.max_new_tokens),
        key=lambda limit: limit[0],
    )
    prompts = tokenize_prompts(data.prompts, tokenizer, template, longest, setting=setting, fix=fix)
    if prompts.num_too_long:
        data = replace(data, num_left_out={**data.num_left_out, setting: prompts.num_too_long})
    return data, prompts


def supervised_rows(
    config: RunConfig, data: DataConfig, tokenizer: Any, evaluated: Mapping[str, Sequence[Prompt]]
) -> tuple[PromptSet, TokenizedPrompts]:
    """The rows with completions that fit the model, and their data set with the number of those that do not."""
    rows = without_contamination(
        load_prompts(data, config.seed, gold_problem, completions=True), evaluated, data.contamination
    )
    template = resolve_template(data.template, data.source)
    prompts = tokenize_prompts(rows.prompts, tokenizer, template, data.max_prompt_tokens)
    fitted = tokenize_completions(prompts, tokenizer, config.model.max_length)
    dropped = {"data.max_prompt_tokens": prompts.num_too_long, "model.max_length": fitted.num_too_long}
    counted = {setting: number for setting, number in dropped.items() if number}
    return replace(rows, num_left_out={**rows.num_left_out, **counted}), fitted


def check_conversations(config: RunConfig, tokenizer: Any) -> None:
    """Raises ConfigError when the environment's responses cannot be rendered in the model's chat template."""
    if not config.environment.multi_turn:
        return
    if problem := chat_template_problem(tokenizer):
        begin = " ".join(str(tokenizer.chat_template).split())[:80]
        raise ConfigError(
            f"environment.name = {config.environment.name!r} needs several turns, which the chat template of "
            f"model.path = {config.model.path!r} does not allow: {problem}. The template begins {begin!r}; change "
            "chat_template in the model folder, or use another model"
        )
    ObservationEncoder(tokenizer, config.environment.max_observation_tokens)


def tokenized_benchmarks(config: RunConfig, tokenizer: Any) -> list[TokenizedBenchmark]:
    """The benchmarks of `evaluation`, rendered. Raises ConfigError when a prompt does not fit the model."""
    limit = config.evaluation.max_new_tokens or config.rollout.max_new_tokens
    longest, setting, fix = prompt_limit(config, "evaluation" if config.evaluation.max_new_tokens else "rollout", limit)
    tokenized: list[TokenizedBenchmark] = []
    for name in config.evaluation.benchmarks:
        benchmark = load_benchmark(name, config.data, config.evaluation, gold_problem)
        if any(benchmark.name == other.benchmark.name for other in tokenized):
            raise ConfigError(f"evaluation.benchmarks: two have the name {benchmark.name}; rename the file of one")
        problems = benchmark.prompts + (benchmark.left_out if config.evaluation.full_at_end else ())
        fitted = tokenize_prompts(problems, tokenizer, benchmark.template, longest, setting=setting, fix=fix)
        if fitted.num_too_long:
            raise ConfigError(
                f"evaluation.benchmarks: {fitted.num_too_long} prompts of {name} leave no room for {limit} new tokens "
                f"in model.max_length = {config.model.max_length}; raise it or lower evaluation.max_new_tokens"
            )
        count = len(benchmark.prompts)
        tokenized.append(TokenizedBenchmark(benchmark, fitted.token_ids[:count], fitted.token_ids[count:]))
    return tokenized


def gold_problem(gold: str) -> str | None:
    """Why a gold answer cannot be used, None when it can."""
    try:
        parse_gold(gold)
    except ValueError as error:
        return str(error)
    return None


def _checkpoint_to_resume(
    store: CheckpointStore, config: RunConfig, out_dir: Path, *, resume: bool, continue_run: bool
) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to resume from, None for the start; and why newer ones were skipped."""
    if resume and not (out_dir / IDENTITY).exists():
        raise CheckpointError(f"--resume: {out_dir} contains no run; omit --resume to start one")
    skipped: list[str] = []
    if resume:
        checkpoint = store.latest()
    elif continue_run and (out_dir / IDENTITY).exists():
        checkpoint, skipped = store.latest_valid()
    else:
        checkpoint = None
    if checkpoint is not None:
        check_same_run(checkpoint, config, out_dir)
    return checkpoint, skipped
