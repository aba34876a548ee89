"""Loads evaluation benchmarks: problems with gold answers, and their hashes."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gxpo_trainer.config import DataConfig, EvaluationConfig
from gxpo_trainer.data.benchmark_specs import BENCHMARKS, FIX, ID_FIELDS, PROBLEM_FIELDS, BenchmarkSpec, find_spec
from gxpo_trainer.data.prompts import EMBEDDED, GoldCheck, field_text, load_prompts, read_prompts, resolve_template
from gxpo_trainer.data.records import SUFFIXES, Record, download, files_of_split, read_records, sha256_of_file
from gxpo_trainer.data.word_problems import generate
from gxpo_trainer.errors import ConfigError, DataError
from gxpo_trainer.types import Prompt
from gxpo_trainer.verify.options import EXTRA_KEY

HELD_OUT_SEED = 0
"""Every run evaluates the same held-out problems of the embedded task, so that seeds are comparable."""
HELD_OUT_PROBLEMS = 512


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Problems, their template (a text with {problem}), and hashes.

    sha256: of the evaluated problems, golds and options. files_sha256: of the source files. left_out: problems beyond
    `evaluation.num_problems`, which must not be trained on either.
    """

    name: str
    prompts: tuple[Prompt, ...]
    template: str
    sha256: str
    files_sha256: dict[str, str] = field(default_factory=dict)
    left_out: tuple[Prompt, ...] = ()


def load_benchmark(
    name: str, data: DataConfig, evaluation: EvaluationConfig, gold_check: GoldCheck | None = None
) -> Benchmark:
    """Load the first `evaluation.num_problems` problems of a benchmark.

    name: a named benchmark, `word_problems` (the embedded task's held-out set), or a .jsonl file with the fields of
    `data`. Raises ConfigError for an unknown name or template, DataError for missing or invalid data.
    """
    spec = find_spec(name)
    files: dict[str, str] = {}
    if name == EMBEDDED:
        found = generate("heldout", evaluation.num_problems or HELD_OUT_PROBLEMS, HELD_OUT_SEED, data.difficulty)
        prompts = tuple(item.prompt for item in found)
        label, template = EMBEDDED, resolve_template(evaluation.template, EMBEDDED, "evaluation.template")
    elif name.endswith(".jsonl"):
        loaded = load_prompts(data.model_copy(update={"source": name, "levels": None}), 0, gold_check)
        prompts, files = loaded.prompts, loaded.sha256
        label, template = Path(name).stem, _template(data, evaluation, "boxed")
    elif spec is not None:
        paths = locate(spec, evaluation.data_root)
        files = {path.name: sha256_of_file(path) for path in paths}
        records = [record for path in paths for record in read_records(path)]
        prompts = read_prompts(records, lambda record: read_row(spec, record), gold_check)
        if not prompts:
            raise DataError(f"{paths[0]}: contains no problems; evaluation.data_root must contain all of {spec.name}")
        label, template = spec.name, _template(data, evaluation, spec.template)
    else:
        known = ", ".join((EMBEDDED, *BENCHMARKS))
        raise ConfigError(f"evaluation.benchmarks: {name!r} is unknown; use {known}, or the path of a .jsonl file")
    evaluated, left_out = prompts[: evaluation.num_problems], prompts[len(prompts[: evaluation.num_problems]) :]
    return Benchmark(label, evaluated, template, _hash(evaluated), files, left_out)


def locate(spec: BenchmarkSpec, data_root: str | None) -> list[Path]:
    """The files of a benchmark, under `evaluation.data_root` if it is set, else from the hub. Raises DataError."""
    if data_root is None:
        patterns = [spec.pattern] if spec.pattern else [f"*{spec.split}*"]
        folder = download(
            spec.hub,
            patterns,
            problem=f"evaluation.benchmarks: cannot download {spec.name} (hub data set {spec.hub})",
            fix=f"set evaluation.data_root to a folder that contains {spec.name}.jsonl, or check the connection",
        )
        return _files_in(folder, spec)
    root = Path(data_root).expanduser()
    if not root.is_dir():
        raise DataError(f"evaluation.data_root = {data_root!r} is not a folder; correct or remove the setting")
    for name in spec.names:
        for path in (root / f"{name}{suffix}" for suffix in SUFFIXES):
            if path.is_file():
                return [path]
        if (root / name).is_dir():
            return _files_in(root / name, spec)
    raise DataError(
        f"evaluation.data_root = {data_root!r} has no copy of {spec.name}; put {spec.name}.jsonl or a folder "
        f"{spec.name} with the files of {spec.hub} there, or remove the setting to load it from the hub"
    )


def _files_in(folder: Path, spec: BenchmarkSpec) -> list[Path]:
    if spec.pattern is not None:
        found = sorted(path for path in folder.rglob(spec.pattern) if path.suffix in SUFFIXES)
        if found:
            return found
    for split in dict.fromkeys((spec.split, "test")):
        for subset in dict.fromkeys((spec.subset, None)):
            with suppress(DataError):
                return files_of_split(folder, split, subset)
    raise DataError(
        f"{folder}: contains no .jsonl or .parquet file of the split {spec.split!r} of {spec.name}; "
        f"set evaluation.data_root to a folder that contains {spec.name}.jsonl"
    )


def read_row(spec: BenchmarkSpec, record: Record) -> Prompt:
    """One problem of a named benchmark, with its verification options, if any, in `extra`."""
    fields = record.fields
    problem = next((name for name in PROBLEM_FIELDS if name in fields), PROBLEM_FIELDS[0])
    gold = spec.gold(record)
    if not gold:
        raise DataError(f"{record.location}: has no final answer; correct or remove the row")
    extra = {name: fields[name] for name in ("level", "subject") if fields.get(name) is not None}
    options = spec.options(record)
    if options is not None:
        extra[EXTRA_KEY] = options
    given = next((fields[name] for name in ID_FIELDS if fields.get(name) is not None), record.name)
    return Prompt(str(given), field_text(record, problem, FIX), gold, extra)


def _template(data: DataConfig, evaluation: EvaluationConfig, default: str) -> str:
    chosen, setting = evaluation.template, "evaluation.template"
    if chosen == "auto":
        chosen, setting = data.template, "data.template"
    return resolve_template(default if chosen == "auto" else chosen, "", setting)


def _hash(prompts: tuple[Prompt, ...]) -> str:
    """SHA-256 of ids, texts, golds and verification options."""
    rows = []
    for prompt in prompts:
        options = prompt.extra.get(EXTRA_KEY)
        rows.append((prompt.id, prompt.text, prompt.gold, *([] if options is None else [options.to_dict()])))
    return hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode()).hexdigest()
