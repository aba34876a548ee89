"""Token counts of a step: what the samplers generate and what the learner's rows hold."""

from __future__ import annotations

from dataclasses import dataclass

from gxpo_trainer.planner.devices import Assumptions
from gxpo_trainer.planner.inputs import Inputs

ATTENTION_BREAK_EVEN = 1024
"""As in algo.batch: the width of a row at which dense attention costs about as much as the rest of the model."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Means over a step.

    prompt: tokens. response: sampled tokens; observation: those that an environment wrote between them. row_width,
    responses_per_row: of the learner's rows. learner_tokens: in all rows of a step, of all ranks. micro_batches: of one
    rank in one pass.
    """

    prompt: float
    response: float
    observation: float
    row_width: float
    responses_per_row: int
    learner_tokens: float
    micro_batches: int

    @property
    def context(self) -> float:
        """Tokens that a response token sees on average."""
        return self.prompt + (self.response + self.observation) / 2


def workload_of(inputs: Inputs, assumed: Assumptions) -> Workload:
    """The expected workload. Lengths are the limits times the assumed fractions."""
    prompt = max(1.0, inputs.prompt_limit * assumed.prompt_fraction)
    response = max(1.0, inputs.response_limit * (1.0 if inputs.full_responses else assumed.response_fraction))
    observation = inputs.observation_limit * assumed.response_fraction
    whole = response + observation
    per_row = _responses_per_row(inputs, prompt, whole) if inputs.rows == "shared" else 1
    width = prompt + per_row * whole
    rows = inputs.prompts * -(-inputs.group // per_row)
    tokens = rows * prompt + inputs.sequences * whole
    ranks = inputs.learner_ranks
    if inputs.rows == "packed":
        micro = tokens / ranks / inputs.token_budget
    else:
        micro = rows / ranks / max(1, int(inputs.token_budget // width))
    return Workload(prompt, response, observation, width, per_row, tokens, max(inputs.mini_batches, -int(-micro // 1)))


def peak_tokens(inputs: Inputs, load: Workload) -> float:
    """Tokens of the largest micro-batch: the budget, or the longest sequence, or all there are."""
    longest = min(inputs.max_length, inputs.prompt_limit + inputs.response_limit + inputs.observation_limit)
    rows = max(1, int(inputs.token_budget // load.row_width))
    filled = inputs.token_budget if inputs.rows == "packed" else rows * load.row_width
    return min(max(filled, longest), load.learner_tokens / inputs.learner_ranks / inputs.mini_batches)


def _responses_per_row(inputs: Inputs, prompt: float, response: float) -> int:
    """Responses that share a prompt's row, by the rule of algo.batch: as long as joining costs less than a new row."""
    alone = prompt + response
    count, width = 1, alone
    while count < inputs.group:
        joined = width + response
        cost = response + (joined**2 - width**2) / ATTENTION_BREAK_EVEN
        if joined > inputs.token_budget or cost >= alone + alone**2 / ATTENTION_BREAK_EVEN:
            break
        count, width = count + 1, joined
    return count
