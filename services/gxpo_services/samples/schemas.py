"""Responses about samples and evaluations. Times are seconds since 1970."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from gxpo_services.api.fields import JsonNumber


class TurnView(BaseModel):
    """One turn of an episode. The text is not trusted: never render it as markup."""

    speaker: str = Field(description="`policy` or `environment`.")
    text: str
    reward: float | None = Field(description="What the environment gave for the turn before; null without one.")


class SampleView(BaseModel):
    """A training sample with its verdict. Its texts are model output: never render them as markup."""

    number: int = Field(description="Sequence number in order of arrival.")
    attempt: int
    step: int
    time: float
    group: int = Field(description="Index of the prompt in the step, from 0.")
    sample: int = Field(description="Index of the response, from 0.")
    prompt_id: str
    prompt: str
    response: str
    extracted: str | None = Field(description="The answer extracted from the response; null without one.")
    gold: str
    verdict: str = Field(examples=["correct"])
    reward: JsonNumber | None
    length: int = Field(description="Tokens of the response.")
    truncated: bool
    turns: list[TurnView] | None = Field(description="The episode; null without an environment.")
    end: str | None = Field(
        description="Why the episode ended: `done`, `max_turns`, `length`, `timeout` or `error`; null without one."
    )
    end_detail: str | None = Field(description="How the environment failed.")
    sampled_length: int | None = Field(description="Tokens that the policy wrote; null without an environment.")
    extra: dict[str, Any] = Field(
        description="Other members of the trainer's line, e.g. detail, weights_version, components."
    )


class SamplePage(BaseModel):
    """Samples in order of arrival."""

    items: list[SampleView]
    next_cursor: str | None = Field(description="Cursor of the next page; null at the end.")
    steps: list[int] = Field(description="All steps of the run that have samples.")


class EvaluationsView(BaseModel):
    """Evaluations in order of steps and benchmarks, one of each."""

    items: list[dict[str, Any]] = Field(
        description="Lines of evaluations.jsonl: attempt, step, time, benchmark, scores, per_problem and more; "
        "NaN, Infinity and -Infinity are strings."
    )
