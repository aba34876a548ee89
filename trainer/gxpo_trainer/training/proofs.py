"""Proofs that sampler and learner have the same weights; a failed one ends the run with both figures.

Every sync compares the checksums of all weights (weights/worker.py). Every step compares the sampler's and the
learner's log-probabilities of the step's responses. At the start a canary changes the weights visibly and checks that
the sampler follows, because at tiny learning rates the effect of one stale version is lost in the noise.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from gxpo_trainer.algo.batch import ScoredSequence, with_scale
from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import VerifierFailed, WeightSyncMismatch
from gxpo_trainer.learner.group import LearnerGroup
from gxpo_trainer.rollout.pool import RolloutPool
from gxpo_trainer.rollout.sources import RolloutPlanner
from gxpo_trainer.types import ScoredGroup

CANARY_PROMPTS = 8
"""Fewest prompts of the canary; with more learner ranks one for each."""
CANARY_SCALE = 0.01
"""First noise of the canary as a share of the mean absolute weight; doubled until its effect shows."""
CANARY_DOUBLINGS = 16
CANARY_EFFECT = 10
"""Least effect of the perturbation on the learner's log-probabilities, in units of the limit on the mean gap."""


def check_gap(config: RunConfig, mean: float, largest: float, step: int) -> str | None:
    """A warning when one token's gap is above its limit, else None.

    Raises WeightSyncMismatch when sampler and learner disagree on average about the step's responses. One token of
    hundreds of thousands proves nothing: in bf16 the largest gap of a step is due to rounding.
    """
    mean_limit, max_limit = config.gap_limits()
    if not mean <= mean_limit:
        raise WeightSyncMismatch(
            f"step {step}: the sampler's and the learner's log-probabilities differ by {mean:.3g} on average (limit "
            f"{mean_limit:g}) and {largest:.3g} at most; the sampler does not hold the learner's weights. If the "
            "precision explains it, raise rollout.logprob_gap_mean_limit"
        )
    if largest <= max_limit:
        return None
    return (
        f"step {step}: the sampler's and the learner's log-probabilities of one token differ by {largest:.3g}, above "
        f"rollout.logprob_gap_max_limit = {max_limit:g}; the mean, {mean:.3g}, is within its limit"
    )


def check_verdicts(config: RunConfig, groups: Sequence[ScoredGroup]) -> None:
    """Raise VerifierFailed when too many verdicts are `timeout` or `error`, or say that nothing judges the response.

    Distillation needs no rewards, so that it may have the latter.
    """
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    failed = [v for v in verdicts if v.failed or (v.reward is None and config.teacher is None)]
    share = len(failed) / len(verdicts)
    if share > config.verifier.max_failed_fraction:
        last = {verdict.status: verdict.detail for verdict in failed}
        counts = Counter(verdict.status for verdict in failed).most_common()
        reasons = "; ".join(f"{number} {status}, last: {last[status]!r}" for status, number in counts)
        raise VerifierFailed(
            f"{len(failed)} of {len(verdicts)} responses have no reward ({share:.0%}; limit "
            f"verifier.max_failed_fraction = {config.verifier.max_failed_fraction:.0%}): {reasons}; "
            "inspect them in samples.jsonl"
        )


def canary(config: RunConfig, learners: LearnerGroup, pool: RolloutPool, planner: RolloutPlanner) -> None:
    """Perturb the learner's weights, sync, check that the sampler's log-probabilities moved as well, restore.

    The perturbation grows until the learner's own log-probabilities change by CANARY_EFFECT times the limit on the mean
    gap; how much noise that takes depends on precision and adapters.

    Raises WeightSyncMismatch when a gap does not close, or when no perturbation shows. The weights are restored; the
    sampler is left with the perturbed version's successor, so sync before sampling. Every engine of the pool must
    follow.
    """
    limit = config.gap_limits()[0]
    # A small data set's prompts are repeated: every learner rank takes part and needs one.
    count = max(CANARY_PROMPTS, config.placement.learner_ranks)
    repeated = itertools.islice(itertools.cycle(planner.token_ids), count)
    # The first token of a prompt has no log-probability: one of a single token is scored as two of it.
    prompts = [np.resize(np.asarray(ids, dtype=np.int32), max(2, len(ids))) for ids in repeated]

    def gap(version: int) -> tuple[float, list[np.ndarray]]:
        """The largest gap of any engine after a sync, and the scores of the first."""
        pool.sync(version)
        scores = pool.score(prompts, version)
        return max(_gap(learners, prompts, of_engine) for of_engine in scores), scores[0]

    before, start = gap(-1)
    try:
        moved = _perturb(config, learners, lambda: _gap(learners, prompts, start), CANARY_EFFECT * limit)
        perturbed, _ = gap(-2)
    finally:
        learners.restore()
    restored, _ = gap(-3)
    # In bf16 the rounding error grows with the size of the log-probabilities, which a strong perturbation raises.
    follows = limit if config.compares_in_fp32 else max(limit, moved / CANARY_EFFECT)
    for when, measured, allowed in (
        ("at the start", before, limit),
        ("after a perturbation", perturbed, follows),
        ("after the perturbation was undone", restored, limit),
    ):
        if not measured <= allowed:
            raise WeightSyncMismatch(
                f"canary: sampler and learner differ by {measured:.3g} on average {when}, the limit is {allowed:.3g} "
                f"(the perturbation moved the learner by {moved:.3g})"
            )


def _perturb(config: RunConfig, learners: LearnerGroup, measure: Callable[[], float], wanted: float) -> float:
    """Perturb the learner until `measure` reaches `wanted`; what it then is. Raises WeightSyncMismatch."""
    scale, moved = CANARY_SCALE, 0.0
    for _ in range(CANARY_DOUBLINGS):
        learners.perturb(scale, config.seed)
        moved = measure()
        if moved >= wanted:
            return moved
        scale *= 2
    raise WeightSyncMismatch(
        f"canary: noise of {scale / 2:.3g} times the mean weight moved the learner by only {moved:.3g}, under "
        f"{wanted:.3g}, so it proves nothing; lower rollout.logprob_gap_mean_limit"
    )


def _gap(learners: LearnerGroup, token_ids: Sequence[np.ndarray], scores: Sequence[np.ndarray]) -> float:
    """Mean |sampler − learner| over all tokens of the lists but each one's first."""
    limit = max(len(ids) for ids in token_ids)
    sequences = [
        ScoredSequence(ids[:1], ids[1:], 0.0, np.asarray(logprobs, dtype=np.float32)[-(len(ids) - 1) :])
        for ids, logprobs in zip(token_ids, scores, strict=True)
    ]
    return learners.gap(with_scale(sequences, limit))[0]
