"""What a policy is measured on: held-out problems with their golds, and a hash that says which ones."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from gxpo_trainer.config import DataConfig
from gxpo_trainer.data.prompts import EMBEDDED, GoldCheck, load_prompts, resolve_template
from gxpo_trainer.data.word_problems import generate
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.types import Prompt

HELD_OUT_SEED = 0
"""The held-out problems of the embedded task are the same for every run: seeds are compared on equal ground."""
HELD_OUT_PROBLEMS = 512


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Problems, the text with {problem} they are put into, and the hash of what was loaded."""

    name: str
    prompts: tuple[Prompt, ...]
    template: str
    sha256: str


def load_benchmark(
    name: str, data: DataConfig, num_problems: int | None, gold_check: GoldCheck | None = None
) -> Benchmark:
    """`word_problems` (the embedded task's held-out set), or a .jsonl file with the fields that `data` names.

    num_problems: the first so many; None for all. Raises ConfigError for an unknown name, DataError for a bad file.
    """
    if name == EMBEDDED:
        found = generate("heldout", num_problems or HELD_OUT_PROBLEMS, HELD_OUT_SEED, data.difficulty)
        prompts = tuple(item.prompt for item in found)
        template = resolve_template("auto", EMBEDDED)
    elif name.endswith(".jsonl"):
        loaded = load_prompts(data.model_copy(update={"source": name, "levels": None}), 0, gold_check)
        prompts = loaded.prompts[:num_problems]
        template = resolve_template(data.template, name)
    else:
        raise ConfigError(f"evaluation.benchmarks: {name!r} is unknown; use {EMBEDDED}, or the path of a .jsonl file")
    body = json.dumps([(p.id, p.text, p.gold) for p in prompts], ensure_ascii=False)
    label = name if name == EMBEDDED else Path(name).stem
    return Benchmark(label, prompts, template, hashlib.sha256(body.encode()).hexdigest())
