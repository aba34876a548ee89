"""A sampler actor that plays scripted agents in threads of its own process, and the course of events in it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gxpo_trainer.environments.contract import Call, ChatRequest, Reply, Turn
from gxpo_trainer.rollout.sampler import SamplerActor
from gxpo_trainer.rollout.vllm_driver import Intake, SampleRequest, SamplingSettings
from gxpo_trainer.types import Group


class ScriptedAgents:
    """Agents that ask by `Problem.extra["asks"]`, one after the other: `say` is the user's message, after those before
    it unless `alone`; further entries are fields of ChatRequest. They answer from the history alone, as a replayed
    episode would."""

    def __init__(self) -> None:
        self.calls: deque[Call] = deque()
        self._threads = ThreadPoolExecutor(32)

    def advance(self, call: Call) -> Future[Reply]:
        self.calls.append(call)
        return self._threads.submit(self._answer, call)

    def end(self, episode: str) -> None: ...

    def _answer(self, call: Call) -> Reply:
        messages: tuple[dict[str, Any], ...] = ()
        for place, ask in enumerate(call.problem.extra["asks"]):
            fields = dict(ask)
            alone = fields.pop("alone", False)
            messages = (*(() if alone else messages), {"role": "user", "content": fields.pop("say")})
            if place == len(call.actions):
                return Reply(ChatRequest(messages, **fields))
            given = json.loads(call.actions[place])
            messages += (given["message"],) if "message" in given else ()
        return Reply(Turn(done=True))


class ConversationActor(SamplerActor):
    """A sampler with scripted agents; every call of `play` has new ones."""

    def play(
        self,
        requests: Sequence[SampleRequest],
        sampling: SamplingSettings,
        version: int,
        update: Any,
        update_at: tuple[int, int],
    ) -> tuple[list[Group], list[Call], int]:
        """Groups as they finish, calls, and how many updates were received.

        update: the bucket of a version that is received between two engine steps, once a response has been answered
        `update_at[0]` times and has sampled `update_at[1]` tokens since.
        """
        self.environments = environments = ScriptedAgents()
        groups: list[Group] = []
        driver, step = self._driver, self._driver.step
        due = [] if update is None else [update]

        def watched_step() -> Any:
            finished = step()
            answered, since = update_at
            for response in [*driver.running.values()]:
                new = len(response.token_ids) - (response.observed[-1][1] if response.observed else 0)
                if due and len(response.observed) == answered and new >= since:
                    self.receive(due.pop())
            return finished

        driver.step = watched_step  # type: ignore[method-assign]
        try:
            intake = Intake(list(enumerate(requests)), closed=True)
            for item in self.sample(intake, sampling, version):
                groups += [group for _, group in item.groups]
        finally:
            del driver.step
        return groups, list(environments.calls), int(update is not None and not due)
