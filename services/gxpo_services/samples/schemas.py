"""Answers about responses and evaluations. Times are seconds since 1970."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from gxpo_services.api.fields import JsonNumber


class SampleView(BaseModel):
    """One response of a training step, with its verdict. Its texts are a model's: show them as text only."""

    number: int = Field(description="Counts up in the order in which samples were written.")
    attempt: int
    step: int
    time: float
    group: int = Field(description="Prompt of the step, from 0.")
    sample: int = Field(description="Response to that prompt, from 0.")
    prompt_id: str
    prompt: str
    response: str
    extracted: str | None = Field(description="The answer found in the response, null when there was none.")
    gold: str
    verdict: str = Field(examples=["correct"])
    reward: JsonNumber | None
    length: int = Field(description="Tokens of the response.")
    truncated: bool
    extra: dict[str, Any] = Field(description="What else the trainer wrote, e.g. detail, weights_version, components.")


class SamplePage(BaseModel):
    """Samples in the order in which they were written."""

    items: list[SampleView]
    next_cursor: str | None = Field(description="For the next page; null at the end.")
    steps: list[int] = Field(description="All steps of the run that have samples.")


class EvaluationsView(BaseModel):
    """Evaluations in order of steps and benchmarks, one of each."""

    items: list[dict[str, Any]] = Field(
        description="Lines of evaluations.jsonl: attempt, step, time, benchmark, scores, per_problem and more; "
        'numbers that JSON lacks are the words "NaN", "Infinity", "-Infinity".'
    )
