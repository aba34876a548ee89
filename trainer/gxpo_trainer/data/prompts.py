"""Loads training prompts from the embedded task, a file, a folder in hub layout or the hub, and tokenizes them.

Free of torch; tokenizers are those of transformers. Rows are rejected, with file and line, if they are not objects,
lack the prompt or the answer, repeat an id, or have a gold answer that the verifier cannot parse. PromptCursor selects
each step's prompts, and can be resumed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from gxpo_trainer.config import DataConfig
from gxpo_trainer.config.tasks import EMBEDDED_TASKS
from gxpo_trainer.data.chat import render_messages
from gxpo_trainer.data.records import Record, find_files, read_records, sha256_of_file
from gxpo_trainer.data.word_problems import Difficulty, generate, guess
from gxpo_trainer.errors import CheckpointError, DataError
from gxpo_trainer.grading.extract import boxed_answer
from gxpo_trainer.types import EXTRA_KEY, Prompt, VerifyOptions

_ROLES = ("system", "user", "assistant")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
"""Half of a character, which JSON can write (`\\ud83d` alone) and no tokenizer reads."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Training problems and their provenance.

    sha256: hash of each data file by name, of generated problems under the task's name. num_left_out: number of
    filtered rows by setting.
    """

    prompts: tuple[Prompt, ...]
    sha256: dict[str, str]
    num_left_out: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenizedPrompts:
    """Prompts within the length limit, with their token ids, int32[prompt length] each, in the same order.

    completion_ids: int32[completion length] of each, with the end token; empty where no completions are learned.
    """

    prompts: tuple[Prompt, ...]
    token_ids: tuple[npt.NDArray[np.int32], ...]
    num_too_long: int
    completion_ids: tuple[npt.NDArray[np.int32], ...] = ()


def load_prompts(
    data: DataConfig,
    seed: int,
    *,
    completions: bool = False,
    check_golds: bool = True,
    most: int | None = None,
    known: Callable[[DataConfig], bool] = lambda part: True,
) -> PromptSet:
    """Load the training problems of `data`, filtered by level. known: of `data.parts`, which to load. most: rows of a
    file to read, without hashes. check_golds: refuse those that the verifier cannot parse.

    completions: with the response of each to learn, and without a gold answer where a row has none.

    Raises DataError, with file and line or setting, when there is no problem or a row is invalid.
    """
    sets = []
    for number, part in enumerate(data.parts):
        if not known(part):
            continue
        try:
            if part.source in EMBEDDED_TASKS:
                loaded = _embedded(part, seed, completions)
            else:
                loaded = _from_files(part, check_golds, most, completions)
        except DataError as error:
            if not data.sources:
                raise
            own = f"data.sources[{number}]"
            text = re.sub(r"\bdata\.(split|subset|prompt_field|answer_field)\b", rf"{own}.\1", str(error))
            raise DataError(re.sub(r"\bdata\.source\b", f"{own}.path", text)) from None
        if data.sources:
            label, rewards = data.sources[number].label, data.sources[number].rewards
            own_ids = [replace(p, id=f"{label}/{p.id}", source=label, rewards=rewards) for p in loaded.prompts]
            hashes = {f"{label}/{name}": sha256 for name, sha256 in loaded.sha256.items()}
            loaded = replace(loaded, prompts=tuple(own_ids), sha256=hashes)
        sets.append(loaded)
    prompts = with_system_prompt(tuple(prompt for each in sets for prompt in each.prompts), data.system_prompt)
    left_out = sum((Counter(each.num_left_out) for each in sets), Counter[str]())
    return PromptSet(prompts, {k: v for each in sets for k, v in each.sha256.items()}, dict(left_out))


def check_shares(
    data: DataConfig,
    prompts: Iterable[Prompt],
    prompts_per_step: int,
    setting: str = "rollout.prompts_per_step",
    unknown: Sequence[int | None] = (),
) -> None:
    """Raises DataError for one of `data.sources` that has fewer problems than its share of a step.

    setting: that of prompts_per_step. unknown: numbers of problems that say nothing, where not all have been read.
    """
    counts = Counter(prompt.source for prompt in prompts)
    for number, (source, share) in enumerate(zip(data.sources, data.shares, strict=True)):
        own, found = math.ceil(share * prompts_per_step - 1e-9), counts[source.label]
        if found < own and found not in unknown:
            raise DataError(
                f"data.sources[{number}].path = {source.path!r}: {found} problem{'' if found == 1 else 's'} for its "
                f"share of {own} of {prompts_per_step} prompts a step, which would contain copies; lower its weight or "
                f"{setting}, or add problems"
            )


def with_system_prompt(prompts: tuple[Prompt, ...], system_prompt: str | None) -> tuple[Prompt, ...]:
    """The problems after a system message, unless their rows have one."""
    if system_prompt is None:
        return prompts
    first = {"role": "system", "content": system_prompt}
    has_own = [bool(prompt.history) and prompt.history[0]["role"] == "system" for prompt in prompts]
    pairs = zip(prompts, has_own, strict=True)
    return tuple(prompt if own else replace(prompt, history=(first, *prompt.history)) for prompt, own in pairs)


def _from_files(data: DataConfig, check_golds: bool, most: int | None, completions: bool) -> PromptSet:
    files = find_files(data.source, data.split, data.subset)
    records = read_records(files, most if data.levels is None else None)
    if not records:
        raise DataError(f"{files[0]}: contains no problems; set data.source to a file that does")
    kept = [r for r in records if data.levels is None or read_level(r.fields.get("level")) in data.levels]
    prompts = read_prompts(kept, lambda record: _prompt(record, data, completions), check_golds)
    if not prompts:
        raise DataError(f"data.levels = {list(data.levels or ())} excludes all {len(records)} problems; add levels")
    left_out = {"data.levels": len(records) - len(kept)} if len(kept) < len(records) else {}
    hashes = {file.name: sha256_of_file(file) for file in files} if most is None else {}
    return PromptSet(prompts, hashes, left_out)


def few_problems(num_problems: int, prompts_per_step: int, setting: str = "rollout.prompts_per_step") -> str | None:
    """What a step of fewer problems than prompts consists of, with the fix; None where a step has no problem twice.
    setting: that of prompts_per_step."""
    if num_problems >= prompts_per_step:
        return None
    return (
        f"{num_problems} problem{'' if num_problems == 1 else 's'} for {prompts_per_step} prompts a step: a step "
        f"contains copies of the same problems; lower {setting} or add problems"
    )


def read_prompts(records: Iterable[Record], read: Callable[[Record], Prompt], check_golds: bool) -> tuple[Prompt, ...]:
    """Convert rows with `read`. Raises DataError for a repeated id, and for golds that the verifier cannot parse."""
    prompts: list[Prompt] = []
    locations: dict[str, str] = {}
    bad_golds: list[str] = []
    for record in records:
        prompt = read(record)
        if prompt.id in locations:
            raise DataError(
                f"{record.location}: repeats the id {prompt.id!r} of {locations[prompt.id]}; make it unique"
            )
        locations[prompt.id] = record.location
        if check_golds and prompt.gold:
            # Not at the top: `gxpo config --check` does without the grader.
            from gxpo_trainer.grading.verify import parse_gold

            try:
                parse_gold(prompt.gold)
            except ValueError as error:
                bad_golds.append(f"{record.location}: the {error}")
        prompts.append(prompt)
    if bad_golds:
        more = f"\n… and {len(bad_golds) - 5} more" if len(bad_golds) > 5 else ""
        raise DataError("\n".join(bad_golds[:5]) + more + "\ncorrect or remove these rows")
    return tuple(prompts)


def embedded_levels(task: str, data: DataConfig) -> tuple[Difficulty, ...]:
    return data.difficulty if task == "word_problems" else ("long",)


def _embedded(data: DataConfig, seed: int, completions: bool) -> PromptSet:
    try:
        prompts = generate("train", data.num_problems, seed, embedded_levels(data.source, data))
    except ValueError as error:
        raise DataError(f"data.{error}") from None
    rng = random.Random(f"gxpo guesses {seed}")
    for number, prompt in enumerate(prompts):
        if not completions:
            prompts[number] = replace(prompt, completion=None)
        elif data.source == "word_problems" and rng.random() < data.guess_share:
            prompts[number] = replace(prompt, completion=guess(prompt, rng))
    body = json.dumps([[prompt.id, prompt.text, prompt.gold] for prompt in prompts])
    return PromptSet(tuple(prompts), {data.source: hashlib.sha256(body.encode()).hexdigest()})


def _prompt(record: Record, data: DataConfig, completions: bool) -> Prompt:
    fix = "set data.prompt_field to one of them"
    value = record.fields.get(data.prompt_field)
    history: tuple[dict[str, str], ...] = ()
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        text, history = _messages(record, data.prompt_field, value)
    else:
        text = field_text(record, data.prompt_field, fix)
    completion = None
    if completions:
        completion = field_text(record, data.completion_field, "set data.completion_field to one of them")
    gold = ""
    if data.answer_field is not None and not (completions and record.fields.get(data.answer_field) is None):
        fix = 'set data.answer_field to one of them, or to "none" for rewards that need no answer'
        gold = final_answer(field_text(record, data.answer_field, fix))
        if not gold:
            fault = f"the answer in {data.answer_field!r} is empty; correct or remove the row"
            raise DataError(f"{record.location}: {fault}")
    left_out = {"id", "solution", data.prompt_field, data.answer_field, *([data.completion_field] * completions)}
    extra = {name: value for name, value in record.fields.items() if name not in left_out and value is not None}
    if EXTRA_KEY in extra:
        try:
            extra[EXTRA_KEY] = VerifyOptions.from_dict(extra[EXTRA_KEY])
        except ValueError as error:
            raise DataError(f"{record.location}: {EXTRA_KEY!r}: {error}") from None
    given = record.fields.get("id")
    return Prompt(record.name if given is None else str(given), text, gold, extra, history, completion)


def _messages(record: Record, name: str, value: list[dict[str, Any]]) -> tuple[str, tuple[dict[str, str], ...]]:
    """Text of the last message, which is the user's, and the messages before it."""
    for number, message in enumerate(value, start=1):
        given = {key: part for key, part in message.items() if part is not None}
        texts = (isinstance(part, str) and part.strip() and not _SURROGATE.search(part) for part in given.values())
        if given.keys() != {"role", "content"} or not all(texts) or given["role"] not in _ROLES:
            raise DataError(
                f"{record.location}: message {number} of {name!r} must have a role, one of {', '.join(_ROLES)}, and a "
                "content, a text that is not empty and has no half of a character (a lone surrogate); it is "
                f"{json.dumps(message, default=str)[:80]}"
            )
    if value[-1]["role"] != "user":
        raise DataError(f"{record.location}: the last message of {name!r} is not the user's; end with what is asked")
    messages = tuple({"role": message["role"], "content": message["content"]} for message in value)
    return messages[-1]["content"], messages[:-1]


def field_text(record: Record, name: str, fix: str) -> str:
    """A field as text, as it stands, or several answers joined by commas.

    Raises DataError, with `fix` if the field is missing.
    """
    if name not in record.fields:
        has = ", ".join(sorted(record.fields)) or "none"
        raise DataError(f"{record.location}: has no field {name!r} (its fields: {has}); {fix}")
    value = "" if record.fields[name] is None else record.fields[name]
    parts = value if isinstance(value, list) else [value]
    if not parts or any(type(part) not in (str, int, float, Decimal) for part in parts):
        raise DataError(f"{record.location}: field {name!r} is {json.dumps(value, default=str)[:80]}; text is expected")
    if any(isinstance(part, float | Decimal) and not math.isfinite(part) for part in parts):
        raise DataError(f"{record.location}: field {name!r} is not a finite number")
    text = ", ".join(str(part).strip() for part in parts) if isinstance(value, list) else str(value)
    if not text.strip():
        raise DataError(f"{record.location}: field {name!r} is empty; correct or remove the row")
    if half := _SURROGATE.search(text):
        fault = f"has half a character (a lone surrogate), {half[0]!r}"
        raise DataError(f"{record.location}: field {name!r} {fault}; correct or remove the row")
    return text


def final_answer(answer: str) -> str:
    """The answer alone: the last box of a worked solution, the text after #### (GSM8K), else the whole text.

    Earlier boxes of a MATH solution are steps or alternative notations.
    """
    start = answer.rfind("\\boxed")
    boxed = boxed_answer(answer[start:]) if start >= 0 else None
    return (answer.rsplit("####", 1)[-1] if boxed is None else boxed[0]).strip()


def read_level(value: Any) -> int | None:
    """The difficulty level of MATH as a number, from 5, 5.0 (a column with empty rows), "5" or "Level 5"; None for
    anything else."""
    match = re.fullmatch(r"\s*(?:Level\s+)?(\d+)(?:\.0)?\s*", str(value))
    return int(match[1]) if match else None


def json_extra(prompt: Prompt) -> dict[str, Any]:
    """Further fields of the problem as JSON values, without its verification options."""
    extra = {name: value for name, value in prompt.extra.items() if name != EXTRA_KEY}
    # A parquet row may hold dates and other values without a JSON form, and NaN where a number is missing.
    return dict(json.loads(json.dumps(extra, default=str), parse_constant=lambda constant: None))


def tokenize_prompts(
    prompts: Iterable[Prompt],
    tokenizer: Any,
    template: str,
    max_prompt_tokens: int,
    *,
    setting: str = "data.max_prompt_tokens",
    fix: str = "raise it",
) -> TokenizedPrompts:
    """Render all prompts; skip and count those longer than `max_prompt_tokens`.

    The problem in the template is the user's turn after the prompt's history (`render_messages`). Raises DataError when
    the chat template refuses a prompt, or when none is left. It names the limit's `setting`, and the `fix`.
    """
    rendered: list[tuple[Prompt, npt.NDArray[np.int32]]] = []
    for prompt in prompts:
        # str.format would fail on the LaTeX braces of problems and templates.
        messages = [*prompt.history, {"role": "user", "content": template.replace("{problem}", prompt.text)}]
        try:
            rendered.append((prompt, render_messages(messages, tokenizer)))
        except Exception as error:  # a template may raise anything
            roles = ", ".join(message["role"] for message in messages)
            advice = "remove data.system_prompt, or " if roles.startswith("system") else ""
            raise DataError(
                f"problem {prompt.id}: the model's chat template refuses messages of {roles} ({error}); {advice}change "
                "the row or the template"
            ) from None
    kept = [(prompt, ids) for prompt, ids in rendered if len(ids) <= max_prompt_tokens]
    if not kept:
        shortest = min((len(ids) for _, ids in rendered), default=0)
        raise DataError(
            f"{setting} = {max_prompt_tokens} excludes all prompts (the shortest has {shortest} tokens); {fix}"
        )
    rows, token_ids = zip(*kept, strict=True)
    return TokenizedPrompts(rows, token_ids, len(rendered) - len(kept))


def tokenize_completions(prompts: TokenizedPrompts, tokenizer: Any, max_length: int) -> TokenizedPrompts:
    """With the completions' token ids: those of the text alone, as if the policy had sampled it, and the end token.

    A row whose prompt and completion exceed `max_length` tokens is left out and counted. Raises DataError when none is
    left.
    """
    texts = (tokenizer(prompt.completion, add_special_tokens=False)["input_ids"] for prompt in prompts.prompts)
    completions = [np.asarray([*tokens, tokenizer.eos_token_id], dtype=np.int32) for tokens in texts]
    rows_of_all = zip(prompts.prompts, prompts.token_ids, completions, strict=True)
    kept = [row for row in rows_of_all if len(row[1]) + len(row[2]) <= max_length]
    if not kept:
        raise DataError(
            f"model.max_length = {max_length} excludes all rows: no prompt and completion fit together; raise it"
        )
    rows, token_ids, completion_ids = zip(*kept, strict=True)
    return TokenizedPrompts(rows, token_ids, len(prompts.prompts) - len(kept), completion_ids)


def make_cursor(data: DataConfig, prompts: Sequence[Prompt], seed: int) -> PromptCursor | MixedCursor:
    """The cursor of a run over these prompts, which `load_prompts` has ordered by source."""
    if not data.sources:
        return PromptCursor(len(prompts), seed=seed, shuffle=data.shuffle)
    sizes = Counter(prompt.source for prompt in prompts)
    cursors = [PromptCursor(sizes[source.label], seed, data.shuffle) for source in data.sources]
    return MixedCursor(cursors, data.shares)


class MixedCursor:
    """Draws from several sources, one after the other in the list of prompts, each with its own cursor and epochs.

    The next prompt is of the source that is furthest behind its share, so that the shares hold in every step, and
    nothing but the sources' cursors decides what comes next.
    """

    def __init__(self, cursors: Sequence[PromptCursor], shares: Sequence[float]) -> None:
        self._cursors, self._shares = cursors, shares
        self._first = np.cumsum([0, *(cursor.num_prompts for cursor in cursors)])

    def next(self, count: int) -> npt.NDArray[np.int64]:
        """The next `count` prompt indices, shape [count]."""
        drawn = [cursor.drawn for cursor in self._cursors]
        chosen = []
        for total in range(sum(drawn) + 1, sum(drawn) + 1 + count):
            source = int(np.argmax([share * total - own for share, own in zip(self._shares, drawn, strict=True)]))
            drawn[source] += 1
            chosen.append(self._first[source] + self._cursors[source].next(1)[0])
        return np.array(chosen, dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        return {"sources": [cursor.state_dict() for cursor in self._cursors]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the positions. Raises CheckpointError when they belong to other data, another seed or order."""
        states = state.get("sources", ())
        if len(states) != len(self._cursors):
            raise CheckpointError(
                f"the checkpoint's data cursor has {len(states) or 'no'} sources and this run has "
                f"{len(self._cursors)}; resume with the checkpoint's data.sources"
            )
        for cursor, own in zip(self._cursors, states, strict=True):
            cursor.load_state_dict(own)


class PromptCursor:
    """Iterates over `num_prompts` prompts, each once per epoch, in an order determined by (seed, epoch).

    A draw that crosses the end of an epoch may contain a prompt twice.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool = True) -> None:
        self._identity: dict[str, Any] = {"num_prompts": num_prompts, "seed": seed, "shuffle": shuffle}
        self.num_prompts = num_prompts
        self.drawn = 0
        """Prompts drawn so far."""

    def next(self, count: int) -> npt.NDArray[np.int64]:
        """The next `count` prompt indices, shape [count]."""
        parts: list[npt.NDArray[np.int64]] = []
        while count > 0:
            epoch, position = divmod(self.drawn, self.num_prompts)
            parts.append(_order(epoch, **self._identity)[position : position + count])
            count -= len(parts[-1])
            self.drawn += len(parts[-1])
        return np.concatenate(parts)

    def state_dict(self) -> dict[str, Any]:
        """JSON-serializable position, with the arguments that it belongs to."""
        epoch, position = divmod(self.drawn, self.num_prompts)
        return {**self._identity, "epoch": epoch, "position": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position. Raises CheckpointError when it belongs to other data, another seed or another order."""
        for name, here in self._identity.items():
            if state.get(name) != here:
                raise CheckpointError(
                    f"the checkpoint's data cursor has {name} = {state.get(name)} and this run has {here}; "
                    "resume with the checkpoint's data, seed and order"
                )
        self.drawn = int(state["epoch"]) * self.num_prompts + int(state["position"])


@functools.lru_cache(maxsize=256)
def _order(epoch: int, num_prompts: int, seed: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """The prompts of one epoch; cached, because `MixedCursor` draws them one by one."""
    order = np.arange(num_prompts, dtype=np.int64)
    return np.random.default_rng([seed, epoch]).permutation(num_prompts) if shuffle else order
