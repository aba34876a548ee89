"""Data types shared by the trainer's packages. Free of torch and Ray."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # processes of episodes and of verdicts do without NumPy
    import numpy as np
    import numpy.typing as npt

VerdictStatus = Literal["correct", "wrong", "unparsed", "timeout", "error", "ungraded"]
"""ungraded: the problem has no answer to compare with, so that only other rewards can judge the response."""
EVASION = "evades a verdict"
"""How the detail of a `wrong` verdict begins when the answer asks for more computation than an honest one could."""
VERDICTS: tuple[VerdictStatus, ...] = ("correct", "wrong", "unparsed", "timeout", "error")
"""Of problems with an answer."""

EXTRA_KEY = "verify"
"""Where a prompt's `extra`, and a line of `gxpo grade`, hold the options (VerifyOptions)."""

EpisodeEnd = Literal["done", "max_turns", "length", "timeout", "error"]

Metrics = dict[str, float]
"""One step's metrics by name (docs/metrics.md), without those that have no value."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One verifiable problem.

    text: the problem before any template; of a row of messages the last one. gold: the final answer alone, empty where
    there is none. completion: the response to learn, None where none is learned. source: label of its data source,
    empty in a run with a single one. rewards: labels of the reward components that judge it; empty: all.
    """

    id: str
    text: str
    gold: str
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the problem's row and its verification options."""
    history: tuple[dict[str, str], ...] = ()
    """Messages before the problem, `role` and `content` each: the system prompt, earlier turns."""
    completion: str | None = None
    source: str = ""
    rewards: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Rules of one problem in addition to its gold answer.

    tolerance: largest absolute error of an answer. unit: of the gold; an answer in another unit of the same quantity is
    converted first. several: the gold is a list of answers, to be given completely, in any order, in one box or in
    several; a comma in it is never a decimal or thousands separator. boxed: only a box holds an answer.

    Raises ValueError for a tolerance below 0 or not finite, or an empty unit.
    """

    tolerance: float = 0.0
    unit: str | None = None
    several: bool = False
    boxed: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance <= sys.float_info.max:
            raise ValueError(f"tolerance = {self.tolerance!r:.40}: must be a finite number of at least 0")
        if self.unit is not None and not self.unit.strip():
            raise ValueError("unit is empty; leave it out")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; only what is set."""
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_dict(cls, body: Any) -> VerifyOptions:
        """From parsed JSON; null is not set. Raises ValueError naming what is wrong."""
        if not isinstance(body, dict):
            raise ValueError(f"is {type(body).__name__} instead of an object with tolerance, unit, several, boxed")
        kinds: dict[str, tuple[tuple[type, ...], str]] = {
            "tolerance": ((int, float), "a number"),
            "unit": ((str,), "text"),
            "several": ((bool,), "true or false"),
            "boxed": ((bool,), "true or false"),
        }
        for name, value in body.items():
            if name not in kinds:
                raise ValueError(f"has the unknown key {name!r}; use {', '.join(kinds)}")
            if value is not None and type(value) not in kinds[name][0]:
                raise ValueError(f"{name} = {value!r}: must be {kinds[name][1]}")
        # A struct of Parquet has every key in every row.
        return cls(**{name: value for name, value in body.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Utterance:
    """One turn of a conversation: what the policy wrote, or how the environment responded.

    reward: what the environment gave for it, None where it gave none; always None for the policy's turns.
    """

    speaker: Literal["policy", "environment"]
    text: str
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """Course of a response in an environment.

    end: why it ended: "done" (the environment ended it, or the policy's last turn), "max_turns", "length" (no room for
    another token), "timeout" or "error" (the environment failed; `detail` says how).
    """

    turns: tuple[Utterance, ...]
    end: EpisodeEnd
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.end in ("timeout", "error")

    @property
    def reward(self) -> float | None:
        """Sum of the environment's rewards; None when it gave none, so that the answer is verified instead."""
        given = [turn.reward for turn in self.turns if turn.reward is not None]
        return sum(given) if given else None


@dataclass(frozen=True, slots=True)
class Sample:
    """One response of the policy; in an environment of several turns the whole conversation after the prompt.

    text: what the policy wrote, without the environment's turns. token_ids, logprobs: [length]; logprobs are the
    sampler's natural log-probabilities at the sampling temperature, 0 where the environment wrote the token.
    finish_reason: "stop" (the last token is end-of-sequence) or "length" (truncated at `rollout.max_new_tokens`).
    versions: (weights version, number of tokens) of consecutive parts of the response; empty: all of it by the version
    of its group. sampled: bool[length], False where the environment wrote the token; None: the policy wrote all.
    episode: None without an environment. prompt_token_ids: int32[length], None for those of the group.
    branches: further rows of the same episode, for requests of an agent that do not extend an earlier one; each has a
    prompt of its own and no text.
    """

    text: str
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish_reason: Literal["stop", "length"]
    versions: tuple[tuple[int, int], ...] = ()
    sampled: npt.NDArray[np.bool_] | None = None
    episode: Episode | None = None
    prompt_token_ids: npt.NDArray[np.int32] | None = None
    branches: tuple[Sample, ...] = ()

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def rows(self) -> tuple[Sample, ...]:
        """The sequences of tokens of this response."""
        return (self, *self.branches)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy wrote, in all rows."""
        own = len(self.token_ids) if self.sampled is None else int(self.sampled.sum())
        return own + sum(branch.num_sampled for branch in self.branches)

    @property
    def num_observed(self) -> int:
        """Tokens after the prompts that an environment wrote, in all rows."""
        return sum(len(row.token_ids) for row in self.rows) - self.num_sampled

    @property
    def sampled_versions(self) -> tuple[tuple[int, int], ...]:
        """`versions`, counting only tokens that the policy wrote, of all rows."""
        others = tuple(part for branch in self.branches for part in branch.sampled_versions)
        if self.sampled is None:
            return self.versions + others
        ends = accumulate((count for _, count in self.versions), initial=0)
        counts = [int(self.sampled[begin:end].sum()) for begin, end in pairwise(ends)]
        own = tuple((version, count) for (version, _), count in zip(self.versions, counts, strict=True) if count)
        return own + others


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt. weights_version: the oldest that sampled a token of them."""

    prompt: Prompt
    prompt_token_ids: npt.NDArray[np.int32]
    samples: tuple[Sample, ...]
    weights_version: int


@dataclass(frozen=True, slots=True)
class HttpUsage:
    """What reward components over HTTP cost.

    calls: requests, retries included. seconds: from their beginnings to their ends, added up. cache_hits: values that
    needed no request, because a response with the same content has or had one.
    """

    calls: int = 0
    seconds: float = 0.0
    cache_hits: int = 0

    def __add__(self, other: HttpUsage) -> HttpUsage:
        return HttpUsage(self.calls + other.calls, self.seconds + other.seconds, self.cache_hits + other.cache_hits)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of verifying one response.

    extracted: the final answer in the response, None if there is none. seconds: wall time of the verification. detail:
    explains `unparsed`, `timeout`, `error`, and a `wrong` that evades a verdict. components, score: value of each
    reward component by label and their weighted sum; None when correctness of weight 1 is the only reward. http:
    cost of components over HTTP, None in a run without them.
    """

    status: VerdictStatus
    extracted: str | None
    seconds: float
    detail: str = ""
    components: dict[str, float] | None = None
    score: float | None = None
    http: HttpUsage | None = None

    @property
    def evades(self) -> bool:
        """Whether the answer is wrong because it asks for more computation than an honest one could."""
        return self.status == "wrong" and self.detail.startswith(EVASION)

    @property
    def failed(self) -> bool:
        """Whether the grader failed, so that the response has no reward."""
        return self.status in ("timeout", "error")

    @property
    def reward(self) -> float | None:
        """The score, or else 1 for correct and 0 for wrong and unparsed; None for a failure, and where nothing judges
        the response."""
        if self.failed:
            return None
        if self.score is not None or self.status == "ungraded":
            return self.score
        return 1.0 if self.status == "correct" else 0.0

    @property
    def reward_components(self) -> dict[str, float]:
        """Value of each reward component; empty without a reward."""
        if self.reward is None:
            return {}
        return {"correctness": self.reward} if self.components is None else self.components


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with one verdict per sample, in order."""

    group: Group
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """Result of one step of a rule.

    metrics: the rule's and the policy's metrics. backward_passes: full-batch gradients computed, including those of a
    step that fell back. finite: False when the step was skipped because its first gradient was not finite. fallback:
    why a look-ahead step ended as a plain GRPO step, else None.
    """

    metrics: Metrics
    backward_passes: int
    finite: bool = True
    fallback: str | None = None
