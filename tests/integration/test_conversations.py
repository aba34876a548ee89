"""Conversations in a real engine: the sampler's log-probabilities over turns, ends, failures, order, updates."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import conversation_actor
import numpy as np
import pytest
import ray
import torch
from conversation_actor import ConversationActor
from support.rollouts import token_logprobs
from transformers import AutoTokenizer, Qwen2ForCausalLM

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.tasks import AgentConfig
from gxpo_trainer.data.chat import render_messages
from gxpo_trainer.data.word_problems import generate
from gxpo_trainer.environments.contract import Call, Problem
from gxpo_trainer.errors import TrainingError
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.rollout.requests import EpisodeStart, SampleRequest, SamplerSettings, SamplingSettings
from gxpo_trainer.rollout.sampler import remote_sampler
from gxpo_trainer.types import Group, Prompt, Sample
from gxpo_trainer.weights.buckets import BucketPacker, WeightBucket
from gxpo_trainer.weights.transports import SharedMemoryPublisher

pytestmark = pytest.mark.engine

MAX_NEW = 120
SAMPLING = SamplingSettings(max_new_tokens=MAX_NEW)
PROBLEMS = generate("train", 64, seed=5, difficulty=("easy",))
TWICE = {"observations": ["no", "try 7 + 5", "ok"]}


@dataclass
class Played:
    groups: dict[str, Group]
    calls: list[Call]
    ended: list[int]
    events: list[str]

    @property
    def samples(self) -> list[tuple[Group, Sample]]:
        return [(group, sample) for group in self.groups.values() for sample in group.samples]


class Bench:
    """The starter policy in an engine, and in transformers for reference."""

    def __init__(self) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(STARTER_FOLDER)
        self.end: int = self.tokenizer.eos_token_id
        self.model: Any = Qwen2ForCausalLM.from_pretrained(STARTER_FOLDER, dtype=torch.float32).eval()
        self.publisher = SharedMemoryPublisher()
        self.version = 0
        self.weights = {0: copy.deepcopy(self.model.state_dict())}
        environment = {"name": "calculator", "max_turns": 3, "max_observation_tokens": 12}
        config = RunConfig.model_validate(
            {"model": {"max_length": 256}, "rollout": {"max_num_seqs": 64}, "environment": environment}
        )
        settings = SamplerSettings(config, str(STARTER_FOLDER), initial_version=0)
        options = {"num_cpus": 0.5, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
        self.actor = remote_sampler(ConversationActor).options(**options).remote(settings)

    def request(self, script: dict[str, Any], samples: int = 3, *, seed: int = 0, **changes: Any) -> SampleRequest:
        """A request of a problem of its own, named by its seed."""
        prompt = PROBLEMS[seed]
        problem = Problem(str(seed), prompt.text, prompt.gold, script)
        ids = render_messages([{"role": "user", "content": prompt.text}], self.tokenizer)
        start = EpisodeStart(problem, seed, changes.pop("max_prompt_tokens", None))
        named = Prompt(str(seed), prompt.text, prompt.gold)
        return SampleRequest(named, ids, samples, seed, changes.pop("sampling", None), start)

    def play(
        self,
        requests: Sequence[SampleRequest],
        sampling: SamplingSettings = SAMPLING,
        update_at: tuple[int, int] | None = None,
        **options: Any,
    ) -> Played:
        """update_at: when the engine receives the next version (ConversationActor.play), which then is the bench's."""
        version = self.version
        if update_at is not None:
            options |= {"update": self.change(), "update_at": update_at}
        groups, *rest = ray.get(self.actor.play.remote(requests, sampling, version, **options))
        return Played({group.prompt.id: group for group in groups}, *rest)

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
        assert row.sampled is not None
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

    def logprobs(self, group: Group, sample: Sample, temperature: float = 1.0) -> np.ndarray:
        """log π of every response token by transformers, float32[length]."""
        return token_logprobs(self.model, group.prompt_token_ids, sample.token_ids, temperature)


def spans(sample: Sample) -> list[tuple[bool, list[int]]]:
    """Consecutive parts of a response by who wrote them."""
    assert sample.sampled is not None
    parts: list[tuple[bool, list[int]]] = []
    for token, mine in zip(sample.token_ids.tolist(), sample.sampled.tolist(), strict=True):
        if not parts or parts[-1][0] != mine:
            parts.append((mine, []))
        parts[-1][1].append(token)
    return parts


@pytest.fixture(scope="module")
def bench(ray_on_loopback: None) -> Iterator[Bench]:
    ray.cloudpickle.register_pickle_by_value(conversation_actor)
    torch.set_num_threads(1)
    made = Bench()
    yield made
    ray.kill(made.actor)
    made.publisher.close()
    ray.cloudpickle.unregister_pickle_by_value(conversation_actor)


@pytest.fixture(scope="module")
def played(bench: Bench) -> Played:
    return bench.play([bench.request(TWICE, seed=seed) for seed in range(8)])


def test_sampler_and_learner_agree_over_whole_conversations(bench: Bench, played: Played) -> None:
    gaps = []
    for group, sample in played.samples:
        assert sample.sampled is not None
        assert sample.logprobs[~sample.sampled].tolist() == [0.0] * int((~sample.sampled).sum())
        gaps.append(np.abs(bench.logprobs(group, sample) - sample.logprobs)[sample.sampled])
    assert sum(len(spans(sample)) >= 3 for _, sample in played.samples) > 12
    assert np.concatenate(gaps).mean() <= 1e-6
    assert np.concatenate(gaps).max() <= 1e-4


def test_a_conversation_is_its_turns_and_the_observations_between_them(bench: Bench, played: Played) -> None:
    answers = [f"<|user|>{text}<|end|><|assistant|>" for text in TWICE["observations"]]
    for group, sample in played.samples:
        assert sample.episode is not None
        parts = spans(sample)
        for number, (mine, ids) in enumerate(parts):
            assert mine == (number % 2 == 0)
            if mine and number < len(parts) - 1:
                assert ids[-1] == bench.end
                assert bench.end not in ids[:-1]
            elif not mine:
                assert bench.tokenizer.decode(ids) == answers[number // 2]
        policy = [turn.text for turn in sample.episode.turns if turn.speaker == "policy"]
        texts = [bench.tokenizer.decode(ids, skip_special_tokens=True) for mine, ids in parts if mine]
        assert policy == texts
        assert sample.text == "\n".join(texts)
        assert sample.finish_reason == ("length" if sample.episode.end == "length" else "stop")
        assert sample.num_sampled <= MAX_NEW
        assert sample.versions == ((bench.version, len(sample.token_ids)),)
        assert group.weights_version == bench.version
    ends = [sample.episode.end for _, sample in played.samples if sample.episode]
    assert {*ends} <= {"done", "length"}
    assert ends.count("done") > 6


def test_the_environment_sees_every_action_once_and_is_released_once(played: Played) -> None:
    histories: dict[str, list[tuple[str, ...]]] = {}
    for call in played.calls:
        histories.setdefault(call.episode, []).append(call.actions)
    assert len(histories) == len(played.samples)
    for history in histories.values():
        assert [len(actions) for actions in history] == list(range(len(history)))
        assert all(after[:-1] == before for before, after in pairwise(history))
    assert played.ended == [1] * len(played.samples)
    last = {history[-1] for history in histories.values()}
    complete = [s.episode for _, s in played.samples if s.episode and s.episode.end == "done"]
    assert {tuple(t.text for t in e.turns if t.speaker == "policy") for e in complete} <= last


def test_nothing_sampled_is_tokenized_again(bench: Bench) -> None:
    """At a high temperature the policy writes texts in tokens that no tokenizer would choose; they stay."""
    hot = SamplingSettings(max_new_tokens=MAX_NEW, temperature=2.0)
    played = bench.play([bench.request(TWICE, 8, seed=seed) for seed in range(12)], hot)
    unusual, gaps = 0, []
    for group, sample in played.samples:
        assert sample.sampled is not None
        for mine, ids in spans(sample)[:-1]:  # turns that were answered
            text = bench.tokenizer.decode(ids)
            unusual += mine and bench.tokenizer(text, add_special_tokens=False)["input_ids"] != ids
        gaps.append(np.abs(bench.logprobs(group, sample, 2.0) - sample.logprobs)[sample.sampled])
    assert unusual > 2
    assert np.concatenate(gaps).mean() <= 1e-6


def test_a_stream_ends_when_no_environment_can_be_run(bench: Bench) -> None:
    with pytest.raises(TrainingError, match="no environment can be run"):
        bench.play([bench.request({**TWICE, "raises": 1}, 2, seed=0), bench.request(TWICE, 2, seed=1)])
    assert len(bench.play([bench.request(TWICE, 2, seed=1)]).groups) == 1


def test_first_messages_are_the_prompt_and_must_be_the_same(bench: Bench) -> None:
    system = {"role": "system", "content": "Count."}
    played = bench.play(
        [
            bench.request({**TWICE, "system": system}, 2, seed=0),
            bench.request({**TWICE, "differs": 1}, 3, seed=1),
            bench.request({**TWICE, "system": {"role": "critic", "content": ""}}, 1, seed=2),
            bench.request(TWICE, 1, seed=3, max_prompt_tokens=4),
            bench.request({**TWICE, "fails": 0}, 1, seed=4),
        ]
    )
    messages = [system, {"role": "user", "content": PROBLEMS[0].text}]
    assert played.groups["0"].prompt_token_ids.tolist() == render_messages(messages, bench.tokenizer).tolist()
    details = [s.episode.detail for s in played.groups["1"].samples if s.episode and s.episode.end == "error"]
    # Replies may come in any order: the first decides what the group sees.
    assert len(details) in (1, 2)
    assert "calculator.reset returned other messages for the same problem and seed" in details[0]
    endings = ("2", "error", "unknown role critic"), ("3", "error", "have 1 to 4"), ("4", "timeout", "no answer")
    for seed, end, detail in endings:
        (sample,) = played.groups[seed].samples
        assert sample.episode is not None
        assert sample.episode.end == end
        assert detail in sample.episode.detail
    assert played.ended == [1] * 8


def test_seeded_conversations_do_not_depend_on_when_environments_answer(bench: Bench) -> None:
    requests = [bench.request(TWICE, 3, seed=seed) for seed in range(4)]
    together = bench.play(requests)
    waiting = bench.request({**TWICE, "waits": 1}, 3, seed=0)
    apart = bench.play([waiting, *requests[1:]], let_go_after="3")
    order = [event for event in apart.events if event != "step"]
    assert order[-1] == "0", "a slow environment holds up no other request"
    for seed in map(str, range(4)):
        for one, two in zip(together.groups[seed].samples, apart.groups[seed].samples, strict=True):
            assert one.token_ids.tolist() == two.token_ids.tolist()


@pytest.mark.parametrize("update_at", [(0, 3), (1, 0), (1, 4)])
def test_an_update_in_flight_keeps_the_versions_of_a_conversation(bench: Bench, update_at: tuple[int, int]) -> None:
    """In the middle of the first turn, of the second, and while the second waits for its first token."""
    first = bench.version
    played = bench.play([bench.request(TWICE, 3, seed=seed) for seed in range(3)], update_at=update_at)
    assert played.events.count("update") == 1
    versions = [bench.verified_versions(group.prompt_token_ids, sample) for group, sample in played.samples]
    assert all(own in ([first], [first, first + 1], [first + 1]) for own in versions)
    assert [first, first + 1] in versions
    assert {group.weights_version for group in played.groups.values()} <= {first, first + 1}


AGENT = AgentConfig(command=("scripted",), max_request_tokens=30)
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
    played = bench.play(requests, SamplingSettings(max_new_tokens=200), update_at, agents=AGENT)
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
    for _, sample in played.samples:
        assert sample.episode is not None
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
            assert row.prompt_token_ids is not None
            versions |= {*bench.verified_versions(row.prompt_token_ids, row)}
    assert versions == {first, bench.version}
    assert sum(len(sample.rows) == 2 for _, sample in played.samples) > 6


def test_an_agent_is_told_of_a_full_context_and_ended_by_an_empty_budget(bench: Bench) -> None:
    asks = [{"say": "How many? " * 200}, {"say": "short", "alone": True}, {"say": "on"}, {"say": "on"}]
    endless = SamplingSettings(max_new_tokens=40, ignore_eos=True)
    played = bench.play([bench.request({"asks": asks}, 2, seed=0)], endless, agents=AGENT)
    for _, sample in played.samples:
        assert sample.episode is not None
        assert (sample.episode.end, sample.num_sampled) == ("length", 40)
    last = max(played.calls, key=lambda call: len(call.actions))
    full, one, two = map(json.loads, last.actions)
    assert full["code"] == "context_length_exceeded"
    assert [(turn["usage"][1], turn["finish_reason"]) for turn in (one, two)] == [(30, "length"), (10, "length")]


def test_closing_a_stream_releases_the_environments(bench: Bench) -> None:
    requests = [bench.request(TWICE, 2, seed=seed) for seed in range(4)]
    ended = ray.get(bench.actor.close_early.remote(requests, SAMPLING, bench.version))
    assert ended == [1] * 8
    assert len(bench.play(requests).groups) == 4
