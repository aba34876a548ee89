"""Training prompts: from the embedded task, a file, a folder in hub layout or the hub, to token ids.

Free of torch; a tokenizer is whatever transformers gives. Refused with the file and the line: rows that are not
objects, lack the prompt or the answer, repeat an id, or hold a gold that the verifier cannot parse.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gxpo_trainer.config import DataConfig
from gxpo_trainer.data.records import Record, find_files, read_records, sha256_of_file
from gxpo_trainer.data.word_problems import generate
from gxpo_trainer.errors import ConfigError, DataError
from gxpo_trainer.types import Prompt
from gxpo_trainer.verify.extract import boxed_answer
from gxpo_trainer.verify.options import EXTRA_KEY, VerifyOptions

EMBEDDED = "word_problems"
TEMPLATES = {
    "plain": "{problem}",
    "boxed": "{problem}\n\nReason step by step and put the final answer in \\boxed{}.",
}

GoldCheck = Callable[[str], str | None]
"""Says why a gold cannot be used, None when it can."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Training problems and where they came from.

    sha256: of each data file by name; of the generated problems under `word_problems`. num_left_out: rows that
    a filter took out, by the setting that did. near_duplicates: problems kept though an evaluated one is much the
    same, in words.
    """

    prompts: tuple[Prompt, ...]
    sha256: dict[str, str]
    num_left_out: dict[str, int] = field(default_factory=dict)
    near_duplicates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenizedPrompts:
    """Prompts that fit, with their token ids in the same order; each int32 of shape [prompt length]."""

    prompts: tuple[Prompt, ...]
    token_ids: tuple[npt.NDArray[np.int32], ...]
    num_too_long: int


def load_prompts(data: DataConfig, seed: int, gold_check: GoldCheck | None = None) -> PromptSet:
    """The training problems that `data` names, filtered by level.

    Raises DataError naming file and line (or setting) when there is nothing to train on or a row cannot be used.
    """
    if data.source == EMBEDDED and not Path(data.source).exists():
        return _embedded(data, seed)
    files = find_files(data.source, data.split, data.subset)
    records = [record for file in files for record in read_records(file)]
    if not records:
        raise DataError(f"{files[0]}: holds no problems; set data.source to a file that does")
    kept = [r for r in records if data.levels is None or read_level(r.fields.get("level")) in data.levels]
    prompts = read_prompts(kept, lambda record: _prompt(record, data), gold_check)
    if not prompts:
        raise DataError(f"data.levels = {list(data.levels or ())} leaves none of the {len(records)} problems; widen it")
    left_out = {"data.levels": len(records) - len(kept)} if len(kept) < len(records) else {}
    return PromptSet(prompts, {file.name: sha256_of_file(file) for file in files}, left_out)


def read_prompts(
    records: Iterable[Record], read: Callable[[Record], Prompt], gold_check: GoldCheck | None
) -> tuple[Prompt, ...]:
    """What `read` makes of each row. Raises DataError for an id that comes twice and for golds that fail the check."""
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    bad_golds: list[str] = []
    for record in records:
        prompt = read(record)
        if prompt.id in places:
            raise DataError(f"{record.place}: has the id {prompt.id!r} of {places[prompt.id]}; ids must be unique")
        places[prompt.id] = record.place
        reason = gold_check(prompt.gold) if gold_check else None
        if reason is not None:
            bad_golds.append(f"{record.place}: the gold {prompt.gold[:80]!r} cannot be parsed: {reason}")
        prompts.append(prompt)
    if bad_golds:
        more = f"\n… and {len(bad_golds) - 5} more" if len(bad_golds) > 5 else ""
        raise DataError("\n".join(bad_golds[:5]) + more + "\nmend these rows or take them out")
    return tuple(prompts)


def _embedded(data: DataConfig, seed: int) -> PromptSet:
    try:
        problems = generate("train", data.num_problems, seed, data.difficulty)
    except ValueError as error:
        raise DataError(f"data.{error}") from None
    prompts = tuple(problem.prompt for problem in problems)
    body = json.dumps([[prompt.id, prompt.text, prompt.gold] for prompt in prompts])
    return PromptSet(prompts, {EMBEDDED: hashlib.sha256(body.encode()).hexdigest()})


def _prompt(record: Record, data: DataConfig) -> Prompt:
    text = field_text(record, data.prompt_field, "set data.prompt_field to one of them")
    gold = final_answer(field_text(record, data.answer_field, "set data.answer_field to one of them"))
    if not gold:
        raise DataError(f"{record.place}: the answer in {data.answer_field!r} is empty; mend the row or take it out")
    left_out = {"id", "solution", data.prompt_field, data.answer_field}
    extra = {name: value for name, value in record.fields.items() if name not in left_out and value is not None}
    if EXTRA_KEY in extra:
        try:
            extra[EXTRA_KEY] = VerifyOptions.from_dict(extra[EXTRA_KEY])
        except ValueError as error:
            raise DataError(f"{record.place}: {EXTRA_KEY!r}: {error}") from None
    given = record.fields.get("id")
    return Prompt(record.name if given is None else str(given), text, gold, extra)


def field_text(record: Record, name: str, fix: str) -> str:
    """A field as text: numbers are written out, several answers joined by commas. Raises DataError, with `fix` where
    the field is missing."""
    if name not in record.fields:
        has = ", ".join(sorted(record.fields)) or "none"
        raise DataError(f"{record.place}: has no field {name!r} (its fields: {has}); {fix}")
    value = record.fields[name]
    parts = value if isinstance(value, list) else [value]
    if not parts or any(isinstance(part, bool) or not isinstance(part, str | int | float) for part in parts):
        raise DataError(f"{record.place}: field {name!r} is {json.dumps(value, default=str)[:80]}; text is expected")
    if any(isinstance(part, float) and not math.isfinite(part) for part in parts):
        raise DataError(f"{record.place}: field {name!r} is not a finite number")
    text = ", ".join(str(part).strip() for part in parts)
    if not text:
        raise DataError(f"{record.place}: field {name!r} is empty; mend the row or take it out")
    return text


def final_answer(answer: str) -> str:
    """The answer alone: the last box of a worked solution, what follows #### (GSM8K), else the text as it is.

    Only the last box: earlier ones of a MATH solution are steps or other ways to write the same.
    """
    start = answer.rfind("\\boxed")
    boxed = boxed_answer(answer[start:]) if start >= 0 else None
    if boxed is not None:
        return boxed[0].strip()
    return answer.rsplit("####", 1)[-1].strip()


def read_level(value: Any) -> int | None:
    """The difficulty level of MATH as a number: 5, "5" and "Level 5" alike; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"(?:Level\s+)?(\d+)", value.strip()) if isinstance(value, str) else None
    return int(match[1]) if match else None


def resolve_template(template: str, source: str, setting: str = "data.template") -> str:
    """The text with {problem} that a template setting stands for.

    Raises ConfigError when it is neither a known name nor such a text.
    """
    if template == "auto":
        template = "plain" if source == EMBEDDED else "boxed"
    text = TEMPLATES.get(template, template)
    if "{problem}" not in text:
        known = ", ".join(("auto", *TEMPLATES))
        raise ConfigError(f"{setting} = {template!r}: must be one of {known}, or a text that holds {{problem}}")
    return text


def render(prompt: Prompt, tokenizer: Any, template: str) -> npt.NDArray[np.int32]:
    """Token ids that the policy continues, int32 of shape [length].

    `template` is a text with {problem} (`resolve_template`). With a chat template the text is the user's turn
    and the assistant's is opened; without one the text stands alone, as the tokenizer begins a text.
    """
    # replace, not format: problems and templates are full of LaTeX braces.
    text = template.replace("{problem}", prompt.text)
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": text}]
        opened = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(opened, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(text)["input_ids"]
    return np.asarray(ids, dtype=np.int32)


def tokenize_prompts(
    prompts: Iterable[Prompt], tokenizer: Any, template: str, max_prompt_tokens: int
) -> TokenizedPrompts:
    """Render all prompts; those longer than `max_prompt_tokens` are left out and counted.

    Raises DataError when none is left.
    """
    kept: list[tuple[Prompt, npt.NDArray[np.int32]]] = []
    num_too_long = 0
    shortest = math.inf
    for prompt in prompts:
        ids = render(prompt, tokenizer, template)
        shortest = min(shortest, len(ids))
        if len(ids) > max_prompt_tokens:
            num_too_long += 1
        else:
            kept.append((prompt, ids))
    if not kept:
        raise DataError(
            f"data.max_prompt_tokens = {max_prompt_tokens} leaves no prompt (the shortest has {shortest} tokens); "
            "raise it"
        )
    return TokenizedPrompts(tuple(prompt for prompt, _ in kept), tuple(ids for _, ids in kept), num_too_long)
