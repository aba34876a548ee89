"""Settings of evaluation."""

from __future__ import annotations

from pydantic import Field

from gxpo_trainer.config.base import Settings


class EvaluationConfig(Settings):
    """Benchmarks during and after training."""

    benchmarks: tuple[str, ...] = Field(
        ("word_problems",),
        description="`word_problems`, `math500`, `amc23`, `gsm8k`, `minerva`, `olympiadbench`, `aime24`, "
        "or paths of .jsonl files.",
    )
    data_root: str | None = Field(
        None, description="Folder with local copies: `<name>.jsonl` or a folder `<name>` in hub layout; none: the hub."
    )
    template: str = Field(
        "auto", description="As data.template; `auto`: data.template, and boxed where that is auto too."
    )
    every_steps: int = Field(10, ge=0, description="0: only at the end.")
    samples_per_prompt: int = Field(4, ge=1, description="n, for pass@k up to n.")
    num_problems: int | None = Field(
        256, ge=1, description="Evaluate the first so many problems of each, in every evaluation; none: all."
    )
    full_at_end: bool = Field(
        False, description="At the end of the budget all problems of each too, as `eval/<benchmark>/full/…`."
    )
    max_new_tokens: int | None = Field(None, ge=1, description="none: rollout.max_new_tokens.")
    at_start: bool = Field(True, description="Also before the first step.")
