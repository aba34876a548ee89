"""Every check of a run that needs no engine: machine, model, data, output folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gxpo_trainer.config import DataConfig, RunConfig, TeacherConfig, WarmStartConfig
from gxpo_trainer.config.tasks import AGENT, AgentConfig
from gxpo_trainer.data.benchmarks import Benchmark, load_benchmark, without_contamination
from gxpo_trainer.data.chat import (
    ObservationEncoder,
    chat_template_problem,
    conversation,
    prompt_text,
    render_messages,
    rendering,
)
from gxpo_trainer.data.checks import FIRST_ROWS, check_files, check_teacher, teacher_errors
from gxpo_trainer.data.prompts import (
    PromptSet,
    TokenizedPrompts,
    check_shares,
    load_prompts,
    make_cursor,
    tokenize_completions,
    tokenize_prompts,
)
from gxpo_trainer.environments.contract import ChatRequest
from gxpo_trainer.environments.host import check_environment
from gxpo_trainer.errors import CheckpointError, ConfigError, DataError
from gxpo_trainer.learner.models import config_json, load_tokenizer, pin_revision, resolve_model
from gxpo_trainer.learner.setup import check_attention
from gxpo_trainer.planner.architectures import check_model, language_model
from gxpo_trainer.planner.devices import usable_cores
from gxpo_trainer.reporting.identity import hash_path
from gxpo_trainer.reporting.reading import IDENTITY, read_identity
from gxpo_trainer.rollout.verification import check_rewards
from gxpo_trainer.rollout.vllm_driver import EpisodeStart
from gxpo_trainer.runtime.placement import Placement, ray_address, visible_gpus
from gxpo_trainer.runtime.progress import ProgressWatch
from gxpo_trainer.training.checkpoints import (
    CHECKPOINTS,
    Checkpoint,
    CheckpointStore,
    check_same_data,
    check_same_model,
    check_same_run,
    with_run_commits,
)
from gxpo_trainer.types import EXTRA_KEY, Prompt, VerifyOptions


@dataclass(frozen=True, slots=True)
class TokenizedBenchmark:
    """A benchmark with its prompts rendered for one tokenizer. token_ids: int32[length] each.

    left_out_ids: those of `benchmark.left_out`, for a full evaluation; empty where none will be made.
    """

    benchmark: Benchmark
    token_ids: Sequence[npt.NDArray[np.int32]]
    left_out_ids: Sequence[npt.NDArray[np.int32]] = ()


@dataclass(frozen=True, slots=True)
class Problems:
    """Training and evaluation problems of a run, rendered for its model.

    first_ids: what the policy sees of the first training problem, with what an environment's `reset` returned. rows:
    those of a supervised run or of a warm start, with their completions.
    """

    tokenizer: Any
    data: PromptSet
    prompts: TokenizedPrompts
    benchmarks: Sequence[TokenizedBenchmark]
    first_ids: npt.NDArray[np.int32]
    rows: TokenizedPrompts | None = None

    def shown(self) -> Iterator[str]:
        """The first training prompt as the policy sees it, the first completion that it learns, and the first prompt of
        each benchmark, each after a line about it."""
        how = rendering(self.tokenizer)
        firsts = [("training prompts", len(self.prompts.prompts), self.first_ids, how)]
        if self.rows is not None:
            learned = self.rows.completion_ids
            firsts.append(("completions", len(learned), learned[0], "with the end token"))
        for each in self.benchmarks:
            firsts += [(f"{each.benchmark.name} prompts", len(each.token_ids), ids, how) for ids in each.token_ids[:1]]
        for name, number, ids, how in firsts:
            yield f"first of {number} {name}, {len(ids)} tokens, {how}:\n{prompt_text(self.tokenizer, ids)}"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that has passed every check that needs no engine."""

    config: RunConfig
    out_dir: Path
    placement: Placement
    model_folder: str
    policy_sha256: str
    training_sha256: dict[str, str]
    """Hash of each file of training data, and of the teacher, under names that no benchmark has."""
    problems: Problems
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
    import ray

    placement = Placement.decide(config, watch)
    if ray_address(config) is None and not ray.is_initialized():  # a Ray of the run's own will start here
        placement.check_fits({"CPU": usable_cores(), "GPU": visible_gpus()})
    has_run = (out_dir / IDENTITY).exists()
    if has_run and not (resume or continue_run):
        raise ConfigError(f"--out {out_dir} already contains a run; add --resume, or choose another folder")
    if resume and not has_run:
        raise CheckpointError(f"--resume: {out_dir} contains no run; omit --resume to start one")
    check_files(config, most=FIRST_ROWS).refuse()
    store = CheckpointStore(out_dir / CHECKPOINTS, config.checkpoint)
    checkpoint, skipped = store.latest() if resume else None, list[str]()
    if continue_run and has_run:
        checkpoint, skipped = store.latest_valid()
    if has_run:  # a branch on the hub may have moved since
        config = with_run_commits(config, out_dir)
    body = config_json(config.model)
    check_model(body, config, placement.device)  # before the weights of a hub name, which may be many gigabytes
    if config.teacher is not None:
        with teacher_errors():
            check_teacher(config_json(config.of_reference.model), config.of_reference)
            pinned = pin_revision(config.of_reference.model)
        config = config.model_copy(update={"teacher": TeacherConfig(path=pinned.path, revision=pinned.revision)})
    config = config.model_copy(update={"model": pin_revision(config.model)})
    placement = replace(placement, config=config.without_idle_engines())
    if has_run:
        check_same_run(checkpoint, config, out_dir)
    model_folder = resolve_model(config.model)
    policy_sha256 = hash_path(Path(model_folder))
    if has_run:
        check_same_model(config, out_dir, policy_sha256)
    if config.placement.device != "auto" or ray_address(config) is None:
        check_attention(config, placement.device)
    check_rewards(config.verifier)
    problems = load_problems(config)
    training_sha256 = {f"training/{name}": sha256 for name, sha256 in problems.data.sha256.items()}
    if config.teacher is not None:
        with teacher_errors():
            training_sha256["teacher.path"] = hash_path(Path(resolve_model(config.of_reference.model)))
    if has_run:
        check_same_data(out_dir, training_sha256)
    if checkpoint is not None:
        check_same_prompts(checkpoint, config, problems)
    rows = (problems.rows.token_ids, problems.rows.completion_ids) if problems.rows else ()
    evaluated = chain.from_iterable((b.token_ids, b.left_out_ids) for b in problems.benchmarks)
    ids = chain.from_iterable((problems.prompts.token_ids, *rows, *evaluated))
    check_tokens(language_model(body), problems.tokenizer, ids)
    hashes = (policy_sha256, training_sha256)
    return Prepared(config, out_dir, placement, model_folder, *hashes, problems, store, checkpoint, skipped)


def load_problems(config: RunConfig) -> Problems:
    """Load and render everything that a run samples from. Raises ConfigError or DataError."""
    tokenizer = load_tokenizer(config.model)
    if config.teacher is not None:
        with teacher_errors():
            vocabulary = load_tokenizer(config.of_reference.model).get_vocab()
        if vocabulary != tokenizer.get_vocab():
            raise ConfigError(
                f"teacher.path = {config.teacher.path!r} has another vocabulary than model.path = "
                f"{config.model.path!r} and cannot score the policy's tokens; choose a teacher of the same family"
            )
    check_conversations(config, tokenizer)
    benchmarks = tokenized_benchmarks(config, tokenizer)
    evaluated = {b.benchmark.name: (*b.benchmark.prompts, *b.benchmark.left_out) for b in benchmarks}
    template = config.data.template_text
    rows: TokenizedPrompts | None = None
    if config.rollout.source == "dataset":
        data, rows = supervised_rows(config, config.data, tokenizer, evaluated)
        prompts = rows
    else:
        data = without_contamination(load_prompts(config.data, config.seed), evaluated, config.data.contamination)
        data, prompts = fitting_prompts(config, data, tokenizer, template)
        if config.warm_start is not None:
            taught, rows = warm_start_rows(config, config.warm_start, tokenizer, evaluated)
            left_out = {**taught.num_left_out, **data.num_left_out}
            data = replace(data, sha256={**taught.sha256, **data.sha256}, num_left_out=left_out)
    check_shares(config.data, prompts.prompts, config.rollout.prompts_per_step)
    first_ids = first_messages(config, tokenizer, prompts.prompts[0], template)
    first_ids = prompts.token_ids[0] if first_ids is None else first_ids
    return Problems(tokenizer, data, prompts, benchmarks, first_ids, rows)


def first_messages(config: RunConfig, tokenizer: Any, first: Prompt, template: str) -> npt.NDArray[np.int32] | None:
    """Begin an episode of a problem (`check_environment`): its first messages, rendered; None for a single turn.

    Raises ConfigError, also for what the policy would not get right in any episode: tools without a parser, and
    messages that the chat template refuses.
    """
    start = EpisodeStart.of(first, template, config.seed)
    asked = check_environment(config.environment, start.problem, start.seed)
    if asked is None:
        return None
    if isinstance(asked, ChatRequest) and asked.tools and getattr(config.environment, "tool_parser", None) is None:
        raise ConfigError(
            "environment.tool_parser: the agent gives the policy tools, whose calls have to be parsed; set it to the "
            "model's format, such as hermes"
        )
    try:
        if isinstance(asked, ChatRequest):
            return render_messages(asked.messages, tokenizer, asked.tools)
        return render_messages(conversation(first.history, asked.messages), tokenizer)
    except Exception as error:  # a chat template may raise anything
        raise ConfigError(
            f"environment.name = {config.environment.name!r}: the chat template refuses the messages of problem "
            f"{first.id} ({error}); change what reset returns or the agent sends, or data.system_prompt"
        ) from None


def check_same_prompts(checkpoint: Checkpoint, config: RunConfig, problems: Problems) -> None:
    """Raises CheckpointError when benchmarks exclude another number of training problems than before the checkpoint.

    For a run whose settings and files of training data are those of the checkpoint.
    """
    state, warm_start = checkpoint.state["cursor"], config.warm_start
    drawn = [(config.data, problems.prompts, state)]
    if warm_start is not None and problems.rows is not None:
        drawn.append((warm_start.data or config.data, problems.rows, state["rows"]))
    for data, prompts, cursor in drawn:
        try:
            make_cursor(data, prompts.prompts, config.seed).load_state_dict(cursor)
        except CheckpointError as error:
            if data.contamination != "drop":
                raise
            begun = read_identity(checkpoint.path.parents[1])["config"]["evaluation"]["benchmarks"]
            raise CheckpointError(
                f"{checkpoint.path} was written with other training problems than those that data.contamination = "
                f"{data.contamination!r} leaves with evaluation.benchmarks = {[*config.evaluation.benchmarks]}; resume "
                f"with {begun}, unchanged, and score others by `gxpo eval`"
            ) from error


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
    problems = tuple(map(boxed, data.prompts)) if config.trains_on_boxes else data.prompts
    prompts = tokenize_prompts(problems, tokenizer, template, longest, setting=setting, fix=fix)
    if prompts.num_too_long:
        data = replace(data, num_left_out={**data.num_left_out, setting: prompts.num_too_long})
    return data, prompts


def supervised_rows(
    config: RunConfig, data: DataConfig, tokenizer: Any, evaluated: Mapping[str, Sequence[Prompt]]
) -> tuple[PromptSet, TokenizedPrompts]:
    """The rows with completions that fit the model, and their data set with the number of those that do not."""
    rows = without_contamination(load_prompts(data, config.seed, completions=True), evaluated, data.contamination)
    prompts = tokenize_prompts(rows.prompts, tokenizer, data.template_text, data.max_prompt_tokens)
    fitted = tokenize_completions(prompts, tokenizer, config.model.max_length)
    dropped = {"data.max_prompt_tokens": prompts.num_too_long, "model.max_length": fitted.num_too_long}
    counted = {setting: number for setting, number in dropped.items() if number}
    return replace(rows, num_left_out={**rows.num_left_out, **counted}), fitted


def warm_start_rows(
    config: RunConfig, warm_start: WarmStartConfig, tokenizer: Any, evaluated: Mapping[str, Sequence[Prompt]]
) -> tuple[PromptSet, TokenizedPrompts]:
    """`supervised_rows` of a warm start; files and settings of data of its own are named apart from the run's."""
    source = warm_start.data or config.data
    try:
        data, rows = supervised_rows(config, source, tokenizer, evaluated)
        check_shares(source, rows.prompts, warm_start.rows_per_step, "warm_start.rows_per_step")
    except DataError as error:
        raise DataError(f"warm_start: {error}") from None
    if warm_start.data is None:
        return data, rows
    hashes = {f"warm_start/{name}": sha256 for name, sha256 in data.sha256.items()}
    left_out = {re.sub(r"^data\.", "warm_start.data.", setting): n for setting, n in data.num_left_out.items()}
    return replace(data, sha256=hashes, num_left_out=left_out), rows


def check_conversations(config: RunConfig, tokenizer: Any) -> None:
    """Raises ConfigError when the environment's responses cannot be rendered in the model's chat template."""
    if not config.environment.multi_turn:
        return
    if isinstance(config.environment, AgentConfig):
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f'environment.name = "{AGENT}" needs a chat template, and model.path = {config.model.path!r} has '
                "none; add chat_template.jinja to the model folder, or use another model"
            )
        return
    if problem := chat_template_problem(tokenizer):
        begin = " ".join(str(tokenizer.chat_template).split())[:80]
        raise ConfigError(
            f"environment.name = {config.environment.name!r} needs several turns, which the chat template of "
            f"model.path = {config.model.path!r} does not allow: {problem}. The template begins {begin!r}; change "
            "chat_template in the model folder, or use another model"
        )
    ObservationEncoder(tokenizer, config.environment.max_observation_tokens)


def tokenized_benchmarks(config: RunConfig, tokenizer: Any, fix: str | None = None) -> list[TokenizedBenchmark]:
    """The benchmarks of `evaluation`, rendered. Raises ConfigError when a prompt does not fit the model, or DataError
    when none does. fix: what to do then, where that is not to change the two settings."""
    limit = config.evaluation.max_new_tokens or config.rollout.max_new_tokens
    section = "evaluation" if config.evaluation.max_new_tokens else "rollout"
    longest, setting, usual = prompt_limit(config, section, limit)
    fix = fix or usual
    tokenized: list[TokenizedBenchmark] = []
    for name in config.evaluation.benchmarks:
        benchmark = load_benchmark(name, config.data, config.evaluation)
        if config.verifier.answer == "boxed":
            prompts, left_out = tuple(map(boxed, benchmark.prompts)), tuple(map(boxed, benchmark.left_out))
            benchmark = replace(benchmark, prompts=prompts, left_out=left_out)
        if any(benchmark.name == other.benchmark.name for other in tokenized):
            raise ConfigError(f"evaluation.benchmarks: two have the name {benchmark.name}; rename the file of one")
        problems = benchmark.prompts + (benchmark.left_out if config.evaluation.full_at_end else ())
        fitted = tokenize_prompts(problems, tokenizer, benchmark.template, longest, setting=setting, fix=fix)
        if fitted.num_too_long:
            raise ConfigError(
                f"evaluation.benchmarks: {fitted.num_too_long} prompts of {name} leave no room for {limit} new tokens "
                f"in model.max_length = {config.model.max_length}; {fix}"
            )
        count = len(benchmark.prompts)
        tokenized.append(TokenizedBenchmark(benchmark, fitted.token_ids[:count], fitted.token_ids[count:]))
    return tokenized


def check_tokens(text: Mapping[str, Any], tokenizer: Any, ids: Iterable[npt.NDArray[np.int32]]) -> None:
    """Raises ConfigError when one of these, or the end token, has no embedding. text: `language_model`."""
    last, size = max([tokenizer.eos_token_id or 0, *(int(each.max(initial=0)) for each in ids)]), text.get("vocab_size")
    if isinstance(size, int) and last >= size:
        raise ConfigError(
            f"model.path: the tokenizer's {tokenizer.convert_ids_to_tokens(last)!r} is token {last}, and the model has "
            f"{size} (vocab_size of config.json), from 0; enlarge it by model.resize_token_embeddings(len(tokenizer))"
        )


def boxed(prompt: Prompt) -> Prompt:
    """The problem with the rule that only a box holds an answer."""
    options = replace(prompt.extra.get(EXTRA_KEY, VerifyOptions()), boxed=True)
    return replace(prompt, extra=prompt.extra | {EXTRA_KEY: options})
