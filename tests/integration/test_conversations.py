"""Agents' conversations in a real engine: the sampler's log-probabilities over rows, limits, updates in flight.

What conversations do with turns: tests/unit/rollout/test_turns.py. A whole run in an environment: test_agents.py.
"""

from __future__ import annotations

import copy
import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
import torch
from support.rollouts import token_logprobs
from transformers import AutoTokenizer, Qwen2ForCausalLM

from gxpo_trainer.config import RunConfig
from gxpo_trainer.data.word_problems import generate
from gxpo_trainer.environments.contract import Call, ChatRequest, Problem, Reply, Turn
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.rollout.sampler import SamplerActor, SamplerSettings, remote_sampler
from gxpo_trainer.rollout.vllm_driver import EpisodeStart, Intake, SampleRequest, SamplingSettings
from gxpo_trainer.types import Group, Sample
from gxpo_trainer.weights.buckets import BucketPacker, WeightBucket
from gxpo_trainer.weights.transports import SharedMemoryPublisher

pytestmark = pytest.mark.engine

PROBLEMS = generate("train", 64, seed=5, difficulty=("easy",))


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


class Played(NamedTuple):
    """groups: in the order in which they finished. updates: how many were received."""

    groups: list[Group]
    calls: list[Call]
    updates: int


class ConversationActor(SamplerActor):
    """A sampler with scripted agents; every call of `play` has new ones."""

    def play(
        self,
        requests: Sequence[SampleRequest],
        sampling: SamplingSettings,
        version: int,
        update: Any,
        update_at: tuple[int, int],
    ) -> Played:
        """update: the bucket of a version that is received between two engine steps, once a response has been answered
        `update_at[0]` times and has sampled `update_at[1]` tokens since."""
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
        return Played(groups, list(environments.calls), int(update is not None and not due))


class Bench:
    """The starter policy in an engine, and in transformers for reference."""

    def __init__(self) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(STARTER_FOLDER)
        self.model: Any = Qwen2ForCausalLM.from_pretrained(STARTER_FOLDER, dtype=torch.float32).eval()
        self.publisher = SharedMemoryPublisher()
        self.version = 0
        self.weights = {0: copy.deepcopy(self.model.state_dict())}
        environment = {"name": "agent", "command": ["scripted"], "max_request_tokens": 30}
        config = RunConfig.model_validate(
            {"model": {"max_length": 256}, "rollout": {"max_num_seqs": 64}, "environment": environment}
        )
        settings = SamplerSettings(config, str(STARTER_FOLDER), initial_version=0)
        options = {"num_cpus": 0.5, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
        self.actor = remote_sampler(ConversationActor).options(**options).remote(settings)

    def request(self, script: dict[str, Any], samples: int = 3, *, seed: int = 0) -> SampleRequest:
        """A request of a problem of its own, chosen by its seed."""
        prompt = PROBLEMS[seed]
        problem = Problem(str(seed), prompt.text, prompt.gold, script)
        start = EpisodeStart(problem, seed)
        return SampleRequest(prompt, np.zeros(1, np.int32), samples, seed, episode=start)

    def play(
        self, requests: Sequence[SampleRequest], sampling: SamplingSettings, update_at: tuple[int, int] | None = None
    ) -> Played:
        """update_at: when the engine receives the next version (ConversationActor.play), which then is the bench's."""
        version = self.version
        update = None if update_at is None else self.change()
        return ray.get(self.actor.play.remote(requests, sampling, version, update, update_at or (0, 0)))

    def change(self) -> WeightBucket:
        """The next version, which differs from the present one."""
        torch.manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        self.version += 1
        self.weights[self.version] = copy.deepcopy(self.model.state_dict())
        bucket = self.publisher.publish(BucketPacker(self.model.named_parameters()), self.version, 0)
        assert bucket.last
        return bucket

    def verified_versions(self, prompt: np.ndarray, row: Sample) -> list[int]:
        """The versions that sampled the parts of a row; every token has the log-probability of its version."""
        begin = 0
        for version, count in row.versions:
            self.model.load_state_dict(self.weights[version])
            part = slice(begin, begin + count)
            gaps = np.abs(token_logprobs(self.model, prompt, row.token_ids) - row.logprobs)[part][row.sampled[part]]
            assert len(gaps) == 0 or gaps.max() <= 1e-4
            begin += count
        self.model.load_state_dict(self.weights[self.version])
        assert begin == len(row.token_ids)
        return [version for version, _ in row.versions]


def spans(sample: Sample) -> list[tuple[bool, list[int]]]:
    """Consecutive parts of a response by who wrote them."""
    parts: list[tuple[bool, list[int]]] = []
    for token, mine in zip(sample.token_ids.tolist(), sample.sampled.tolist(), strict=True):
        if not parts or parts[-1][0] != mine:
            parts.append((mine, []))
        parts[-1][1].append(token)
    return parts


@pytest.fixture(scope="module")
def bench(ray_on_loopback: None) -> Iterator[Bench]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    torch.set_num_threads(1)
    made = Bench()
    yield made
    ray.kill(made.actor)
    made.publisher.close()
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


ASKS = [
    {"say": PROBLEMS[0].text},
    {"say": "no"},
    {"say": PROBLEMS[1].text, "alone": True},
    {"say": "shorter", "max_tokens": 3},
    {"say": "hotter", "sampling": {"temperature": 1.5}},
    {"say": "up to =", "stop": ("=", "1")},
]


@pytest.mark.parametrize("update_at", [None, (0, 3), (1, 0), (1, 2)])
def test_every_row_of_an_agent_has_the_tokens_that_were_sampled_for_it(
    bench: Bench, update_at: tuple[int, int] | None
) -> None:
    """Conversations of two and three turns, and a request that is refused. Weights may change within the first turn,
    within the second, and while the second waits for its first token."""
    first = bench.version
    requests = [bench.request({"asks": ASKS}, 3, seed=seed) for seed in range(4)]
    played = bench.play(requests, SamplingSettings(max_new_tokens=200), update_at)
    answers = {call.episode: [json.loads(action) for action in call.actions] for call in played.calls}
    texts = []
    for given in answers.values():
        assert given[4] == {"error": "temperature = 1.5 is not that of the run, 1; remove it", "code": "invalid_value"}
        turns = [answer for answer in given if "message" in answer]
        assert [turn["usage"][1] <= most for turn, most in zip(turns, (30, 30, 30, 3, 30), strict=True)] == [True] * 5
        texts.append([turn["message"]["content"] for turn in turns])
        assert "=" not in texts[-1][4]
        assert "1" not in texts[-1][4]
    versions = set()
    for sample in [sample for group in played.groups for sample in group.samples]:
        assert sample.episode.end == "done"
        turns = [turn.text for turn in sample.episode.turns if turn.speaker == "policy"]
        assert turns in texts
        assert sample.text == turns[-1]
        assert len(sample.rows) >= 2
        written = [ids for row in sample.rows for mine, ids in spans(row) if mine]
        decoded = [bench.tokenizer.decode(ids, skip_special_tokens=True) for ids in written]
        # The last turn has its stop text in the row, and not in the answer.
        assert all(text.startswith(turn) for text, turn in zip(sorted(decoded), sorted(turns), strict=True))
        for row in sample.rows:
            versions |= {*bench.verified_versions(row.prompt_token_ids, row)}
    assert versions == {first, bench.version}
    assert {group.weights_version for group in played.groups} <= versions
    assert played.updates == (update_at is not None)
    assert sum(len(sample.rows) == 2 for group in played.groups for sample in group.samples) > 6


def test_an_agent_is_told_of_a_full_context_and_ended_by_an_empty_budget(bench: Bench) -> None:
    asks = [{"say": "How many? " * 200}, {"say": "short", "alone": True}, {"say": "on"}, {"say": "on"}]
    endless = SamplingSettings(max_new_tokens=40, ignore_eos=True)
    played = bench.play([bench.request({"asks": asks}, 2, seed=0)], endless)
    for sample in [sample for group in played.groups for sample in group.samples]:
        assert (sample.episode.end, sample.num_sampled) == ("length", 40)
    last = max(played.calls, key=lambda call: len(call.actions))
    full, one, two = map(json.loads, last.actions)
    assert full["code"] == "context_length_exceeded"
    assert [(turn["usage"][1], turn["finish_reason"]) for turn in (one, two)] == [(30, "length"), (10, "length")]
