"""The verifier as a Ray actor: scores groups while the sampler is still sampling.

Worker processes do the work, and servers that of components over HTTP; the actor imports neither torch nor vLLM.
`VerifierHandle` restarts an actor that dies and submits the groups that were lost with it again.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from gxpo_trainer.config import RunConfig, VerifierConfig
from gxpo_trainer.data.prompts import json_extra
from gxpo_trainer.errors import ConfigError, Stalled, TrainingError, VerifierFailed
from gxpo_trainer.grading.http_rewards import HttpAnswer, HttpReward
from gxpo_trainer.grading.pool import Pair, VerifierPool
from gxpo_trainer.grading.rewards import OWN, URLS, tokens
from gxpo_trainer.plugins import check_address
from gxpo_trainer.rollout.vllm_driver import Sampled
from gxpo_trainer.runtime.deaths import ACTOR_LOST
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.ray_session import MAX_RESTARTS, Event, TracedProcess, end_stalled, trace_this_process
from gxpo_trainer.types import EXTRA_KEY, Group, HttpUsage, Sample, Verdict, VerdictStatus


class VerifierActor:
    """Scores groups in killable processes. `score` raises VerifierFailed when no worker can be started, and ConfigError
    when an address is not allowed on this machine."""

    def __init__(self, config: VerifierConfig) -> None:
        self._config = config
        self._pool = make_pool(config, config.workers)
        self._http: list[HttpReward] | None = None

    async def trace(self) -> TracedProcess:
        return trace_this_process()

    async def score(self, sampled: Sampled, rewards: Sequence[bool]) -> list[tuple[Verdict, ...]]:
        """One verdict per sample of each group, in order. Several calls may be in flight.

        rewards: of each group, whether to compute reward components, which an evaluation does not use.
        """
        both = zip(sampled.groups, rewards, strict=True)
        return await asyncio.gather(*(self._scored(group, computed) for (_, group), computed in both))

    async def _scored(self, group: Group, rewards: bool) -> tuple[Verdict, ...]:
        config = self._config.judging(group.prompt)
        verdicts = await self._verdicts(group, rewards and bool(config.worker_rewards))
        if not rewards:
            return verdicts
        if not config.http_rewards:
            if config.worker_rewards or config.rewards[0].weight == 1.0:
                return verdicts
            # Correctness alone: its value is the reward, which may be what the environment gave.
            return tuple(v if v.reward is None else weighed(config, v, v.reward_components) for v in verdicts)
        if self._http is None:
            self._http = make_http_rewards(self._config)
        every = zip(self._config.http_rewards, self._http, strict=True)
        asked = [component for reward, component in every if reward in config.http_rewards]
        posted = [i for i, verdict in enumerate(verdicts) if not verdict.failed]
        bodies = [http_body(group, group.samples[i], verdicts[i]) for i in posted]
        columns = await asyncio.gather(*(component.answers(bodies) for component in asked))
        answers = dict(zip(posted, zip(*columns, strict=True), strict=True))
        return tuple(with_http(config, verdict, answers.get(i, ())) for i, verdict in enumerate(verdicts))

    async def _verdicts(self, group: Group, components: bool) -> tuple[Verdict, ...]:
        """Verdicts of a group, from its episodes where they decide, and else from the worker processes."""
        verdicts = [episode_verdict(sample) for sample in group.samples]
        open_ = [i for i, verdict in enumerate(verdicts) if not verdict or (components and not verdict.failed)]
        pairs = pairs_of(group, [(group.samples[i], verdicts[i]) for i in open_], components)
        graded = await asyncio.wrap_future(self._pool.submit(pairs))
        for i, verdict in zip(open_, graded, strict=True):
            verdicts[i] = verdict
        return tuple(verdict for verdict in verdicts if verdict)

    async def close(self) -> None:
        await asyncio.gather(*(component.close() for component in self._http or ()))
        await asyncio.to_thread(self._pool.close)


def with_http(config: VerifierConfig, verdict: Verdict, answers: Sequence[HttpAnswer]) -> Verdict:
    """The verdict with the components over HTTP, in the order of the run file, and the sum of all."""
    usage = sum((answer.usage for answer in answers), HttpUsage())
    if verdict.failed:
        return replace(verdict, http=usage)
    values = dict(verdict.components or {})
    if failed := [answer for answer in answers if answer.value is None]:
        detail = "; ".join(answer.detail for answer in failed)
        timed_out = all(answer.failure == "timeout" for answer in failed)
        status: VerdictStatus = "timeout" if timed_out else "error"
        return Verdict(status, verdict.extracted, verdict.seconds, detail, http=usage)
    for reward, answer in zip(config.http_rewards, answers, strict=True):
        assert answer.value is not None
        values[reward.label] = answer.value
    return weighed(config, replace(verdict, http=usage), values)


def weighed(config: VerifierConfig, verdict: Verdict, values: Mapping[str, float]) -> Verdict:
    """The verdict with the values of all components, in the order of the run file, and their weighted sum."""
    components = {reward.label: values[reward.label] for reward in config.rewards}
    score = sum(reward.weight * values[reward.label] for reward in config.rewards)
    if not math.isfinite(score):
        detail = f"the weighted sum of the rewards is {score}"
        return Verdict("error", verdict.extracted, verdict.seconds, detail, http=verdict.http)
    return replace(verdict, components=components, score=score)


def make_pool(config: VerifierConfig, workers: int) -> VerifierPool:
    """The verifier pool of a run, without reward components when correctness is the only reward."""
    rewards = [reward.model_dump(mode="json") for reward in config.worker_rewards]
    return VerifierPool(workers, config.deadline_s, config.memory_mb, rewards)


def make_http_rewards(config: VerifierConfig) -> list[HttpReward]:
    """The components over HTTP of a run. Raises ConfigError when one is not allowed on this machine."""
    for reward in config.http_rewards:
        check_address("verifier.rewards", reward.url, URLS)
    known = tokens(os.environ)
    return [HttpReward(reward, known.get(reward.url)) for reward in config.http_rewards]


def episode_verdict(sample: Sample) -> Verdict | None:
    """The verdict that follows from the sample's episode: it failed, or its environment gave rewards.

    The score is the sum of these rewards; the answer is correct if it is positive. None: the answer must be verified.
    """
    episode = sample.episode
    if episode is None:
        return None
    if episode.failed:
        return Verdict("timeout" if episode.end == "timeout" else "error", None, 0.0, episode.detail)
    reward = episode.reward
    if reward is None:
        return None
    if not math.isfinite(reward):
        return Verdict("error", None, 0.0, f"the sum of the environment's rewards is {reward}")
    return Verdict("correct" if reward > 0 else "wrong", None, 0.0, score=reward)


def pairs_of(group: Group, samples: Sequence[tuple[Sample, Verdict | None]], components: bool) -> list[Pair]:
    """Worker input for each sample of the group: gold, response and, where needed, options and reward context.

    samples: with the verdict that the episode gave, if any; only their components remain to be computed.
    """
    options = group.prompt.extra.get(EXTRA_KEY)
    shared: dict[str, Any] = {} if options is None else {"options": options.to_dict()}
    gold = group.prompt.gold
    if not components:
        return [(gold, sample.text, shared) if shared else (gold, sample.text) for sample, _ in samples]
    context = {"problem": group.prompt.text, "extra": json_extra(group.prompt)}
    if group.prompt.rewards:
        context["rewards"] = list(group.prompt.rewards)

    def of_sample(sample: Sample, given: Verdict | None) -> dict[str, Any]:
        own = {**context, "num_tokens": sample.num_sampled, "truncated": sample.truncated}
        if (episode := sample.episode) is not None:
            turns = [(turn.speaker, turn.text, turn.reward) for turn in episode.turns]
            own |= {"turns": turns, "environment_reward": episode.reward}
        return {"context": own} if given is None else {"context": own, "status": given.status}

    return [(gold, sample.text, {**shared, **of_sample(sample, given)}) for sample, given in samples]


def http_body(group: Group, sample: Sample, verdict: Verdict) -> dict[str, Any]:
    """What a component over HTTP posts about a sample (grading/http_rewards.py)."""
    turns = sample.episode.turns if sample.episode is not None else ()
    return {
        "problem": group.prompt.text,
        "gold": group.prompt.gold,
        "answer": sample.text if verdict.extracted is None else verdict.extracted,
        "response": sample.text,
        "turns": [{"speaker": turn.speaker, "text": turn.text, "reward": turn.reward} for turn in turns],
        "extra": json_extra(group.prompt),
    }


def check_rewards(config: VerifierConfig) -> None:
    """Check the reward components before a run starts, importing classes in a worker process only.

    Raises ConfigError when a class is not allowlisted or cannot be constructed, or when an address is not allowed.
    """
    make_http_rewards(config)
    if all(reward.name in OWN for reward in config.worker_rewards):
        return
    try:
        with make_pool(config, workers=1) as pool:
            pool.submit([("1", "1")]).result()
    except VerifierFailed as error:
        raise ConfigError(f"verifier.rewards: workers fail to start with these classes: {error}") from error


@dataclass(slots=True)
class Submitted:
    """A reference of sampled groups, and the indices of their requests. rewards: see `VerifierActor.score`. actor: that
    scores them, once they are submitted."""

    indices: Sequence[int]
    groups: Any
    rewards: Sequence[bool]
    actor: Any = None


class VerifierHandle:
    """Submits groups by reference: they go from the engine to the verifier without passing through this process."""

    def __init__(self, config: RunConfig, placement: Placement, log_event: Event) -> None:
        self._config, self._placement, self._log_event = config, placement, log_event
        self.actor: Any = None
        self._traced: Any = None
        """A reference, available once the actor has started: by what its stacks can be read."""

    def start(self) -> None:
        actor = ray.remote(VerifierActor).options(**self._placement.verifier_options())
        self.actor = actor.remote(self._config.verifier)
        self._traced = self.actor.trace.remote()

    def submit(self, submitted: Submitted) -> Any:
        """Score groups; returns a reference of their verdicts."""
        submitted.actor = self.actor
        return self.actor.score.remote(submitted.groups, submitted.rewards)

    def await_verdicts(self, pending: dict[Any, Submitted]) -> dict[int, Sequence[Verdict]]:
        """Verdicts of each request. Raises TrainingError when the verifier dies repeatedly."""
        verdicts: dict[int, Sequence[Verdict]] = {}
        restarts = 0
        while pending:
            lost: list[Submitted] = []
            for reference, submitted in pending.items():
                try:
                    if submitted.actor is self.actor:
                        self._placement.group.get(self._traced, "setup")
                    scored = self._placement.group.get(reference, "verifying")
                    verdicts.update(zip(submitted.indices, scored, strict=True))
                except (*ACTOR_LOST, Stalled) as error:
                    if submitted.actor is self.actor:  # else it has been restarted since
                        restarts += 1
                        self._restart(restarts, error)
                    lost.append(submitted)
            pending = {self.submit(submitted): submitted for submitted in lost}
        return verdicts

    def kill(self) -> None:
        if self.actor is not None:
            ray.kill(self.actor, no_restart=True)
        self.actor = None

    def _restart(self, restarts: int, error: Exception) -> None:
        cause = str(error).strip().splitlines()[0]
        what = "stalled" if isinstance(error, Stalled) else "died"
        self._log_event("verifier_restarted", f"the verifier {what} ({cause}) and was restarted")
        if isinstance(error, Stalled):
            ready, _ = ray.wait([self._traced], timeout=0)
            with self._placement.group.watch.excluded():
                end_stalled({"verifier": (self.actor, ray.get(ready[0]) if ready else None)})
        self.kill()  # a stalled one is alive; its other calls fail with it
        if restarts > MAX_RESTARTS:
            raise TrainingError(
                f"the verifier {what} {restarts} times in one step; see events.jsonl", reason="verifier_failed"
            ) from error
        self._placement.group.back_off(restarts)
        self.start()
