"""What a run's files tell before anything starts: one list of checks for `gxpo config --check`, `gxpo plan`, `gxpo
train`, and for requests to the service. Free of torch; asks no hub.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from gxpo_trainer.config import DataConfig, RunConfig, WarmStartConfig
from gxpo_trainer.config.tasks import EMBEDDED_TASKS
from gxpo_trainer.data.benchmarks import BY_ANY_NAME, load_benchmark
from gxpo_trainer.data.prompts import check_shares, few_problems, load_prompts
from gxpo_trainer.data.records import on_hub
from gxpo_trainer.errors import ConfigError, DataError, GxpoError
from gxpo_trainer.planner.architectures import (
    check_architecture,
    check_heads,
    check_positions,
    check_sequence_parallel,
    known_config,
    local_model,
    read_config,
)
from gxpo_trainer.types import Prompt

FIRST_ROWS = 100
"""Rows of a file that are read where a check must be quick: a sweep has 500 runs."""
_NO_BENCHMARK = "evaluation.benchmarks names none: no accuracy is measured; name a file of problems that are kept apart"
Check = tuple[str, set[str], Callable[["_Files"], Iterable[str]]]
"""Setting, sections whose files are read, and what returns notes and raises ConfigError or DataError."""


@dataclass(frozen=True, slots=True)
class Findings:
    """faults: setting, why the run cannot work with it and what to do. notes: what to know about a run that can."""

    faults: tuple[tuple[str, GxpoError], ...]
    notes: tuple[str, ...]

    def refuse(self) -> None:
        """Raise the only fault, or a ConfigError with one line for each."""
        if len(self.faults) == 1:
            raise self.faults[0][1]
        if self.faults:
            raise ConfigError("\n".join(["the run cannot work:", *(f"  {error}" for _, error in self.faults)]))


def check_files(
    config: RunConfig, *, most: int | None = None, gpus: int | None = None, unseen: Collection[str] = ()
) -> Findings:
    """Every fault of the run that its files show.

    most: rows to read of each file; None: all. gpus: of the machine that the run is for, None where it is not known.
    unseen: sections whose files are on other machines only, so that nothing follows from their absence.
    """
    files = _Files(config, most)
    faults: list[tuple[str, GxpoError]] = []
    notes: list[str] = []
    for setting, needed, check in _checks(config):
        try:
            if not needed & {*unseen}:
                notes += [note for note in check(files) if note not in notes]
        except (ConfigError, DataError, OSError) as caught:
            # A name that is too long, or no permission.
            error = ConfigError(f"{setting}: cannot be read ({caught})") if isinstance(caught, OSError) else caught
            if all(str(error) != str(earlier) for _, earlier in faults):
                faults.append((setting, error))
    if gpus == 0 and config.placement.device == "gpu":
        reason = 'placement.device = "gpu" but this machine has none; set it to "auto", or placement.ray_address'
        faults.append(("placement.device", ConfigError(reason, reason="no_resources")))
    return Findings(tuple(faults), tuple(notes))


class _Files:
    """What the checks read, each at most once. Reading raises ConfigError or DataError."""

    def __init__(self, config: RunConfig, most: int | None) -> None:
        self.config, self.most = config, most

    @cached_property
    def model(self) -> Path | None:
        return local_model(self.config.model)

    @cached_property
    def problems(self) -> tuple[Prompt, ...] | None:
        """The training problems, of a supervised run with completions."""
        return self.rows(self.config.data, completions=self.config.rollout.source == "dataset")

    def rows(self, data: DataConfig, *, completions: bool) -> tuple[Prompt, ...] | None:
        """The rows of `data` but for those that must be downloaded, or generated for nothing; None: all must."""

        def known(part: DataConfig) -> bool:  # embedded tasks are generated for every model alike
            return not (self.most if part.source in EMBEDDED_TASKS else on_hub(part.source))

        rows = load_prompts(
            data, self.config.seed, completions=completions, check_golds=False, most=self.most, known=known
        )
        return rows.prompts or None


@contextmanager
def teacher_errors() -> Iterator[None]:
    """Name `teacher` in each ConfigError about the model of `RunConfig.of_reference`, which is the teacher."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(_of_teacher(str(error))) from None


def _of_teacher(message: str) -> str:
    return message.replace("model.path", "teacher.path").replace("model.revision", "teacher.revision")


def check_teacher(body: Mapping[str, Any], config: RunConfig) -> None:
    """All checks of a teacher's config.json. config: that of `of_reference`. Raises ConfigError."""
    check_architecture(body, config)
    check_sequence_parallel(body, config)


def _model(check: Callable[[Mapping[str, Any], RunConfig], None], files: _Files) -> list[str]:
    path = files.config.model.path
    body = known_config(path) if files.model is None else read_config(files.model, path)
    if body is not None:
        check(body, files.config)
    said = files.model is not None or check not in (check_architecture, check_teacher)
    return [] if said else [f"model.path = {path!r} is no folder here: a run downloads it from the hub"]


def _teacher(config: RunConfig, files: _Files) -> list[str]:
    """config: that of `of_reference`."""
    with teacher_errors():
        return [_of_teacher(note) for note in _model(check_teacher, _Files(config, files.most))]


def _data(files: _Files) -> Iterable[str]:
    data, per_step = files.config.data, files.config.rollout.prompts_per_step
    return _enough(files, files.problems, "data", data, per_step, "rollout.prompts_per_step")


def _enough(
    files: _Files, rows: Sequence[Prompt] | None, section: str, data: DataConfig, per_step: int, setting: str
) -> list[str]:
    """Whether the rows of `data` are enough for a step. setting: that of per_step."""
    check_shares(data, rows or (), per_step, setting, (0, files.most))
    if rows is None or data.sources:
        return _downloaded(section, data)
    few = few_problems(len(rows), per_step, setting)
    return [few] if few is not None and len(rows) != files.most else []


def _downloaded(section: str, data: DataConfig) -> list[str]:
    names = [f"sources[{number}].path" for number in range(len(data.sources))] or ["source"]
    return [
        f"{section}.{name} = {part.source!r} is no file or folder here: a run downloads it from the hub"
        for name, part in zip(names, data.parts, strict=True)
        if part.source not in EMBEDDED_TASKS and on_hub(part.source)
    ]


def _warm_start(warm_start: WarmStartConfig, files: _Files) -> Iterable[str]:
    data, section = (warm_start.data, "warm_start.data") if warm_start.data else (files.config.data, "data")
    try:
        rows = files.rows(data, completions=True)
        return _enough(files, rows, section, data, warm_start.rows_per_step, "warm_start.rows_per_step")
    except DataError as error:
        raise DataError(f"warm_start: {error}") from None


def _benchmark(name: str, files: _Files) -> list[str]:
    evaluation = files.config.evaluation
    if name in BY_ANY_NAME and evaluation.data_root is None:
        return [f"evaluation.benchmarks: a run downloads {name} from the hub, unless its cache has it"]
    if name not in EMBEDDED_TASKS:
        load_benchmark(name, files.config.data, evaluation, check_golds=False, most=files.most)
    return []


def _answers(files: _Files) -> Iterable[str]:
    """Whether any gold answer alone has room in a response, where the reward asks for it."""
    limit, rewards = files.config.rollout.max_new_tokens, files.config.verifier.rewards
    file = files.model and files.model / "tokenizer.json"
    tokenizer = _tokenizer(file, file.stat().st_mtime_ns) if file and file.is_file() else None
    graded = files.config.rollout.source == "sampled" and any(reward.name == "correctness" for reward in rewards)
    if tokenizer is None or not files.problems or not graded:
        return ()
    lengths = (len(tokenizer.encode(problem.gold, add_special_tokens=False).ids) for problem in files.problems)
    too_long = list(takewhile(lambda length: length > limit, lengths))
    if len(too_long) == len(files.problems):
        raise ConfigError(
            f"rollout.max_new_tokens = {limit}: none of the {len(too_long)} answers fits, the shortest has "
            f"{min(too_long)} tokens; raise it"
        )
    return ()


@lru_cache(maxsize=2)
def _tokenizer(file: Path, _version: int) -> Any | None:
    """A tokenizer, without loading transformers; None where that is not possible, as in the service's image."""
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(file))
    except Exception:  # The library raises bare Exception; the trainer reports a damaged tokenizer.
        return None


def _checks(config: RunConfig) -> list[Check]:
    warm_start = config.warm_start
    section = "warm_start.data" if warm_start is not None and warm_start.data is not None else "data"
    return [
        ("model.path", {"model"}, partial(_model, check_architecture)),
        ("placement.tensor_parallel", {"model"}, partial(_model, check_heads)),
        ("learner.sequence_parallel", {"model"}, partial(_model, check_sequence_parallel)),
        ("model.max_length", {"model"}, partial(_model, check_positions)),
        *([("teacher.path", {"model"}, partial(_teacher, config.of_reference))] if config.teacher else []),
        ("data.sources" if config.data.sources else "data.source", {"data"}, _data),
        *([] if warm_start is None else [(f"{section}.source", {"data"}, partial(_warm_start, warm_start))]),
        *(
            (f"evaluation.benchmarks[{number}]", {"data"}, partial(_benchmark, name))
            for number, name in enumerate(config.evaluation.benchmarks)
        ),
        *(
            []
            if config.evaluation.benchmarks
            else [("evaluation.benchmarks", set[str](), lambda files: [_NO_BENCHMARK])]
        ),
        ("rollout.max_new_tokens", {"model", "data"}, _answers),
    ]
