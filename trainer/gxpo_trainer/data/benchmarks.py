"""Evaluation benchmarks: problems with gold answers, their hashes, and the training problems that repeat them.

A named benchmark is a BenchmarkSpec: where its copy is, and one small function per peculiarity of its rows.

A training problem repeats an evaluation problem when both have the same words, numbers and signs, ignoring case,
spacing and punctuation; the messages before an evaluation problem are part of it.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from gxpo_trainer.config import DataConfig, EvaluationConfig
from gxpo_trainer.config.tasks import EMBEDDED_TASKS
from gxpo_trainer.data.prompts import (
    PromptSet,
    embedded_levels,
    field_text,
    final_answer,
    load_prompts,
    read_prompts,
    with_system_prompt,
)
from gxpo_trainer.data.records import (
    SUFFIXES,
    Record,
    download,
    files_of_split,
    read_records,
    sha256_of_file,
)
from gxpo_trainer.data.word_problems import generate
from gxpo_trainer.errors import ConfigError, DataError
from gxpo_trainer.jsonl import local_path
from gxpo_trainer.types import EXTRA_KEY, Prompt, VerifyOptions

FIX = "copies of this benchmark have it: correct the row, or set evaluation.data_root to another copy"


@dataclass(frozen=True, slots=True)
class BenchmarkSpec:
    """One benchmark.

    names: accepted in settings and for local copies, the canonical one first. hub, subset, split: the public copy;
    pattern: its files, if the repository has an unusual layout. gold: the final answer of a row. options: verification
    options of a row, None for the defaults.
    """

    names: tuple[str, ...]
    hub: str
    split: str
    gold: Callable[[Record], str]
    options: Callable[[Record], VerifyOptions | None] = lambda record: None
    subset: str | None = None
    pattern: str | None = None

    @property
    def name(self) -> str:
        return self.names[0]


def plain_answer(record: Record, *names: str) -> str:
    """The first of the named fields that the row has: `answer`, or the last box of `solution` (MATH)."""
    names = names or ("answer", "Answer", "solution")
    name = next((name for name in names if record.fields.get(name) not in (None, "", [])), names[0])
    return final_answer(field_text(record, name, FIX))


def number_after_hashes(record: Record) -> str:
    """The number after ####, without thousands separators (GSM8K writes `#### 2,125`)."""
    gold = plain_answer(record)
    return gold.replace(",", "") if re.fullmatch(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?", gold) else gold


def whole_number(record: Record) -> str:
    """The answer with whole numbers normalized: AMC's `27.0` is 27, AIME's `073` is 73."""
    gold = plain_answer(record)
    match = re.fullmatch(r"0*([0-9]+)(?:\.0*)?", gold)
    return match[1] if match else gold


def minerva_answer(record: Record) -> str:
    r"""`answer_latex`, else the answer with Python notation (`4.5e33`, `-1./3`, `np.arcsin(x)`) converted to LaTeX."""
    if isinstance(record.fields.get("answer_latex"), str):
        return field_text(record, "answer_latex", FIX).strip()
    gold = plain_answer(record)
    if (number := re.fullmatch(r"([-+]?[0-9]+(?:\.[0-9]*)?)[eE]([-+]?)0*([0-9]+)", gold)) is not None:
        return f"{number[1]} \\times 10^{{{number[2].strip('+')}{number[3]}}}"
    if (quotient := re.fullmatch(r"(-?)([0-9]+)\./([0-9]+)", gold)) is not None:
        return f"{quotient[1]}\\frac{{{quotient[2]}}}{{{quotient[3]}}}"
    return re.sub(r"\bnp\.(?=[a-z])", r"\\", gold)


def olympiad_answer(record: Record) -> str:
    """All answers of `final_answer`, without dollar signs; corrects one gold with a stray letter."""
    gold = plain_answer(record, "final_answer", "answer").replace("$", "").strip().rstrip(".")
    return {"t(0,4]": "(0,4]"}.get(gold, gold)


def olympiad_options(record: Record) -> VerifyOptions | None:
    """`is_multiple_answer`, `unit`, and `error`, an absolute tolerance."""
    error, unit, several = (record.fields.get(name) for name in ("error", "unit", "is_multiple_answer"))
    is_list = str(several).strip().lower() in ("true", "1")
    try:
        options = VerifyOptions(float(error or 0), str(unit or "").strip() or None, is_list)
    except ValueError:
        raise DataError(f"{record.location}: error = {error!r} is not a tolerance; correct the row") from None
    return None if options == VerifyOptions() else options


BENCHMARKS = {
    spec.name: spec
    for spec in (
        BenchmarkSpec(("math500", "math_500", "MATH-500"), "HuggingFaceH4/MATH-500", "test", plain_answer),
        BenchmarkSpec(("amc23", "amc2023"), "math-ai/amc23", "test", whole_number),
        BenchmarkSpec(("gsm8k", "gsm8k_test"), "openai/gsm8k", "test", number_after_hashes, subset="main"),
        BenchmarkSpec(("minerva", "minerva_math", "minervamath"), "math-ai/minervamath", "test", minerva_answer),
        BenchmarkSpec(
            ("olympiadbench", "olympiad_bench", "OlympiadBench"),
            "Hothan/OlympiadBench",
            "train",
            olympiad_answer,
            olympiad_options,
            pattern="*OE_TO_maths_en_COMP*",
        ),
        BenchmarkSpec(("aime24", "aime2024", "aime_2024"), "HuggingFaceH4/aime_2024", "train", whole_number),
    )
}
"""Benchmarks by name, in the order of the GXPO paper's tables, AIME24 last."""

BY_ANY_NAME = {name: spec for spec in BENCHMARKS.values() for name in spec.names}
"""Benchmarks by name or alias."""
HELD_OUT_SEED = 0
"""Every run evaluates the same held-out problems of an embedded task, so that seeds are comparable."""
HELD_OUT_PROBLEMS = 512


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Problems, their template (a text with {problem}), and hashes.

    sha256: of the evaluated problems, golds and options, and of the messages before the problems. files_sha256: of the
    source files. left_out: problems beyond `evaluation.num_problems`, which must not be trained on either.
    """

    name: str
    prompts: tuple[Prompt, ...]
    template: str
    sha256: str
    files_sha256: dict[str, str] = field(default_factory=dict)
    left_out: tuple[Prompt, ...] = ()


def load_benchmark(
    name: str, data: DataConfig, evaluation: EvaluationConfig, *, check_golds: bool = True, most: int | None = None
) -> Benchmark:
    """Load the first `evaluation.num_problems` problems of a benchmark.

    name: a named benchmark, an embedded task (its held-out set), or a data file with the fields of `evaluation`, or
    else of `data`. most: rows to read of its files, without hashes; None: all. check_golds: refuse those that the
    verifier cannot parse. Raises ConfigError for an unknown name, DataError for missing or invalid data.
    """
    spec = BY_ANY_NAME.get(name)
    own = evaluation.template != "auto" or name in EMBEDDED_TASKS
    template = evaluation.template if own else data.template
    alone = data.model_copy(update={"source": name, "sources": (), "levels": None, "template": template})
    files: dict[str, str] = {}
    if name in EMBEDDED_TASKS:
        levels = embedded_levels(name, data)
        generated = generate("heldout", evaluation.num_problems or HELD_OUT_PROBLEMS, HELD_OUT_SEED, levels)
        prompts, label = tuple(replace(prompt, completion=None) for prompt in generated), name
    elif name.endswith(SUFFIXES):
        prompt_field = evaluation.prompt_field or data.prompt_field
        answer_field = evaluation.answer_field or data.answer_field
        if answer_field is None:
            raise ConfigError(
                f"evaluation.answer_field: the problems of {name!r} need answers, and data.answer_field is none; name "
                "their field"
            )
        if not local_path(name).is_file():
            raise DataError(f"evaluation.benchmarks: the file {name!r} does not exist; correct its path")
        fields = {"prompt_field": prompt_field, "answer_field": answer_field, "system_prompt": None}
        try:
            loaded = load_prompts(alone.model_copy(update=fields), 0, check_golds=check_golds, most=most)
        except DataError as error:
            text = re.sub(r"set data\.(prompt|answer)_field", r"set evaluation.\1_field", str(error))
            raise DataError(text.replace("set data.source to", "set evaluation.benchmarks to")) from None
        prompts, files, label = loaded.prompts, loaded.sha256, Path(name).stem
    elif spec is not None:
        paths = locate(spec, evaluation.data_root)
        files = {path.name: sha256_of_file(path) for path in paths} if most is None else {}
        prompts = read_prompts(read_records(paths, most), lambda record: read_row(spec, record), check_golds)
        if not prompts:
            raise DataError(f"{paths[0]}: contains no problems; evaluation.data_root must contain all of {spec.name}")
        label = spec.name
    else:
        known, suffixes = ", ".join((*EMBEDDED_TASKS, *BENCHMARKS)), ", ".join(SUFFIXES)
        raise ConfigError(f"evaluation.benchmarks: {name!r} is unknown; use {known}, or the path of a {suffixes} file")
    prompts = with_system_prompt(prompts, data.system_prompt)
    evaluated = prompts[: evaluation.num_problems]
    rows = []
    for prompt in evaluated:
        options = prompt.extra.get(EXTRA_KEY)
        further = ([] if options is None else [options.to_dict()]) + ([prompt.history] if prompt.history else [])
        rows.append((prompt.id, prompt.text, prompt.gold, *further))
    digest = hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode("utf-8", "backslashreplace")).hexdigest()
    return Benchmark(label, evaluated, alone.template_text, digest, files, left_out=prompts[len(evaluated) :])


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
    root = local_path(data_root)
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
        files = sorted(path for path in folder.rglob(spec.pattern) if path.suffix in SUFFIXES)
        if files:
            return files
    for split in dict.fromkeys((spec.split, "test")):
        for subset in dict.fromkeys((spec.subset, None)):
            with suppress(DataError):
                return files_of_split(folder, split, subset)
    raise DataError(
        f"{folder}: contains no .jsonl, .csv or .parquet file of the split {spec.split!r} of {spec.name}; "
        f"set evaluation.data_root to a folder that contains {spec.name}.jsonl"
    )


def read_row(spec: BenchmarkSpec, record: Record) -> Prompt:
    """One problem of a named benchmark, with its verification options, if any, in `extra`."""
    fields = record.fields
    problem = next((name for name in ("problem", "question", "Problem") if name in fields), "problem")
    gold = spec.gold(record)
    if not gold:
        raise DataError(f"{record.location}: has no final answer; correct or remove the row")
    extra = {name: fields[name] for name in ("level", "subject") if fields.get(name) is not None}
    options = spec.options(record)
    if options is not None:
        extra[EXTRA_KEY] = options
    given = next((fields[name] for name in ("id", "unique_id", "ID") if fields.get(name) is not None), record.name)
    return Prompt(str(given), field_text(record, problem, FIX).strip(), gold, extra)


_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|q?quad|[bB]ig{1,2}[lrm]?)(?![a-z])|\\[,;:!() \[\]]"
    r"|\\(?:text|mathrm|mbox|textbf|textit)(?=\s*\{)"
)
_SYNONYMS = {"\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\leq": "\\le", "\\geq": "\\ge", "\\neq": "\\ne",
             "\\cdots": "\\dots", "\\ldots": "\\dots"}  # fmt: skip
_EACH = "\u3040-\u30ff\u3400-\u9fff"
"""Chinese and Japanese, which have no spaces between words: every character is a word."""
_TOKEN = re.compile(rf"\\[a-z]+|\d+(?:\.\d+)?|[{_EACH}]|[^\W\d_{_EACH}]+|[^\w\s.,;:?'\"`${{}}~]|_")
_TYPED = ((re.compile("[²³¹⁰ⁱ⁴-ⁿ]+"), "^"), (re.compile("[₀-ₜ]+"), "_"), (re.compile("[¼-¾⅐-⅟①-⓿]"), " "))
"""Superscripts, subscripts, and fractions and circled numbers, of which NFKC would make digits of the number before."""
_PUNCTUATION = re.compile(r"[^\x00-\x7f\w\s\u2300-\u2bff‰]")
"""Signs beyond ASCII that may be punctuation or invisible: not the brackets of mathematics."""
_LATEX = zip("×÷·⋅±≤≥≠∞√π", "times div cdot cdot pm le ge ne infty sqrt pi".split(), strict=True)
_SIGNS = str.maketrans({sign: f" \\{name} " for sign, name in _LATEX} | dict.fromkeys("−‐–—", "-"))
_SIGNS |= str.maketrans({"°": "^\\circ ", "⁄": "/", "‖": "\\|"})


def words(text: str) -> str:
    """The text's lower-case words, numbers, LaTeX commands and operators, without layout and punctuation.

    Typed signs such as ², ≤ and × become what LaTeX writes for them.
    """
    if not text.isascii():
        for characters, sign in _TYPED:
            text = characters.sub(rf"{sign}\g<0> ", text)
        text = unicodedata.normalize("NFKC", text).translate(_SIGNS)
        text = _PUNCTUATION.sub(lambda found: " " if unicodedata.category(found[0])[0] in "PC" else found[0], text)
    tokens: list[str] = _TOKEN.findall(_LAYOUT.sub(" ", text.lower()))
    return " ".join(_SYNONYMS.get(token, token) for token in tokens)


def _asked(prompt: Prompt) -> str:
    """The words of a problem and of the messages before it, without the system's."""
    messages = [message["content"] for message in prompt.history if message["role"] != "system"]
    return words("\n".join([*messages, prompt.text]))


def find_duplicates(train: Sequence[Prompt], benchmarks: Mapping[str, Sequence[Prompt]]) -> list[tuple[str, str, str]]:
    """Training problems that are also problems of the benchmarks (by name): id, benchmark, id of its problem.

    Messages before an evaluation problem belong to it; a training problem may have examples before a whole one.
    """
    evaluated: dict[str, tuple[str, str]] = {}
    for name, prompts in benchmarks.items():
        for prompt in prompts:
            evaluated.setdefault(_asked(prompt), (name, prompt.id))
    matches = ((p.id, evaluated.get(_asked(p)) or evaluated.get(words(p.text))) for p in train)
    return [(train_id, *match) for train_id, match in matches if match is not None]


def without_contamination(
    data: PromptSet, benchmarks: Mapping[str, Sequence[Prompt]], policy: Literal["drop", "refuse", "ignore"]
) -> PromptSet:
    """Apply `data.contamination` to the training problems.

    Raises DataError with `refuse` if one is a problem of a benchmark, with `drop` if none would be left.
    """
    if policy == "ignore":
        return data
    duplicates = find_duplicates(data.prompts, benchmarks)
    if not duplicates:
        return data
    repeated = {train_id for train_id, _, _ in duplicates}
    kept = tuple(prompt for prompt in data.prompts if prompt.id not in repeated)
    if policy == "refuse" or not kept:
        train_id, benchmark, problem_id = duplicates[0]
        raise DataError(
            f"data.contamination = {policy!r}: {len(repeated)} of {len(data.prompts)} training problems are problems "
            f"of evaluation.benchmarks, such as {train_id} is {problem_id} of {benchmark}; "
            + ('remove them, or set it to "drop"' if kept else "train and evaluate on different problems")
        )
    return replace(data, prompts=kept, num_left_out={**data.num_left_out, "data.contamination": len(repeated)})
