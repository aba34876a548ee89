"""Responses about samples and evaluations. Times are seconds since 1970."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from gxpo_services.api.fields import JsonNumber

Missing = SkipJsonSchema[None]
"""A member that may be missing, and is never null."""


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


class SampleGroupView(BaseModel):
    """All responses to a prompt in a step, also those that are not on the page."""

    step: int
    attempt: int
    group: int = Field(description="Index of the prompt in the step, from 0.")
    prompt_id: str
    responses: int
    correct: int = Field(description="Responses with the verdict `correct`.")


class SamplePage(BaseModel):
    """Samples in order of arrival."""

    items: list[SampleView]
    groups: list[SampleGroupView] = Field(description="The groups of these samples, with all their responses.")
    next_cursor: str | None = Field(description="Cursor of the next page; null at the end.")
    steps: list[int] = Field(description="All steps of the run that have samples.")


class EvaluationView(BaseModel):
    """One benchmark at one step, as its line of evaluations.jsonl has it.

    Members without `*` are missing where the trainer did not write them; further ones are returned as they are.
    """

    model_config = ConfigDict(extra="allow")

    attempt: int
    step: int
    benchmark: str
    scores: dict[str, JsonNumber] = Field(description="Scores by name, e.g. `pass@1`, `pass@1/ci_low`, `maj@4`.")
    time: JsonNumber | Missing = None
    per_problem: list[JsonNumber] | Missing = Field(
        None, description="pass@1 of each problem; missing with `per_problem=false`."
    )
    problem_ids: list[str] | Missing = Field(None, description="In the order of `per_problem`.")
    num_problems: int | Missing = None
    samples_per_prompt: int | Missing = None
    weights_version: int | Missing = Field(None, description="Step whose weights were evaluated.")
    data_sha256: str | Missing = Field(None, description="Of the evaluated problems, golds and options.")
    files_sha256: dict[str, str] | Missing = Field(None, description="Of the source files, by name.")
    template: str | Missing = Field(None, description="Of the prompts.")
    sampling: dict[str, Any] | Missing = Field(None, description="`temperature`, `max_new_tokens` and `seeded`.")
    environment: dict[str, Any] | Missing = Field(None, description="What answered the policy; missing without one.")
    versions: dict[str, str] | Missing = Field(None, description="Of what a verdict depends on.")
    backward_passes_total: JsonNumber | Missing = Field(None, description="Cost of the run up to the evaluation.")
    training_s: JsonNumber | Missing = None
    tokens_total: JsonNumber | Missing = None


class EvaluationsView(BaseModel):
    """Evaluations in order of steps and benchmarks, one of each."""

    items: list[EvaluationView]
