"""The nouns that travel between the parts of the trainer. Free of torch and Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

VerdictStatus = Literal["correct", "wrong", "unparsed", "timeout", "error"]
EVASION = "evades a verdict"
"""How the detail of a `wrong` verdict begins when the answer asks for more computation than an honest one could."""
VERDICTS: tuple[VerdictStatus, ...] = ("correct", "wrong", "unparsed", "timeout", "error")

Metrics = dict[str, float]
"""One step's metrics by their final names (docs/metrics.md). A value that does not exist is left out."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One verifiable problem.

    `text` is the problem as a person reads it, before any template; `gold` is the final answer alone.
    """

    id: str
    text: str
    gold: str
    extra: dict[str, Any] = field(default_factory=dict)
    """What a benchmark needs beside the gold: level, subject, unit, tolerance, several answers."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One response of the policy.

    token_ids and logprobs have shape [length]; logprobs are the sampler's log π(token), natural log, at
    the sampling temperature. `finish_reason` is "stop" (end-of-sequence, which is the last token id) or
    "length" (cut at `rollout.max_new_tokens`).
    """

    text: str
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish_reason: Literal["stop", "length"]

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt, drawn by one version of the weights."""

    prompt: Prompt
    prompt_token_ids: npt.NDArray[np.int32]
    samples: tuple[Sample, ...]
    weights_version: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier found about one response.

    `extracted` is the final answer that was read from the response, None when there was none. `seconds` is
    the wall time of the verification. `detail` says more about `unparsed`, `timeout`, `error` and a `wrong` that evades
    a verdict. `components`: value of each reward component by its label, and `score` their weighted sum; None where
    correctness alone is the reward.
    """

    status: VerdictStatus
    extracted: str | None
    seconds: float
    detail: str = ""
    components: dict[str, float] | None = None
    score: float | None = None

    @property
    def evades(self) -> bool:
        """Whether the answer is wrong because it asks for more computation than an honest one could."""
        return self.status == "wrong" and self.detail.startswith(EVASION)

    @property
    def reward(self) -> float | None:
        """The score; without one 1 for correct, 0 for wrong and unparsed. None for timeout and error (no evidence
        about the policy)."""
        if self.status in ("timeout", "error"):
            return None
        if self.score is not None:
            return self.score
        return 1.0 if self.status == "correct" else 0.0

    @property
    def reward_components(self) -> dict[str, float]:
        """Value of each component; empty without a reward."""
        if self.reward is None:
            return {}
        return {"correctness": self.reward} if self.components is None else self.components


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with one verdict a sample, in the order of the samples."""

    group: Group
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one rule step did.

    metrics: the rule's and the policy's metrics by final name. backward_passes: full-batch gradients that it
    took, wasted ones of a fallen-back step included. finite: False when the step was skipped because its
    first gradient was not finite. fallback: why a look-ahead step ended as a plain GRPO step, else None.
    """

    metrics: Metrics
    backward_passes: int
    finite: bool = True
    fallback: str | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One benchmark at one policy version, with everything needed to say whether two are comparable."""

    benchmark: str
    step: int
    weights_version: int
    num_problems: int
    samples_per_prompt: int
    scores: dict[str, float]
    """`pass@1`, `pass@1/ci_low`, `pass@1/ci_high`, `pass@k`, `maj@n`, `length_mean`, `truncated_fraction`."""
    data_sha256: str
    sampling: dict[str, Any]
    template: str
