"""The vLLM sampler behind its Ray actor against transformers, and every way in which a sync can go wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import sampler_actor
import torch
from sampler_actor import END, FIRST_LETTER, LETTERS, BreakableSamplerActor, save_experts, save_policy
from transformers import PreTrainedModel

from gxpo_trainer.config.engines import WEIGHT_BUCKET_BYTES
from gxpo_trainer.errors import ConfigError, WeightSyncMismatch
from gxpo_trainer.rollout.requests import SampleRequest, SamplerSettings, SamplingSettings
from gxpo_trainer.rollout.sampler import remote_sampler
from gxpo_trainer.types import Group, Prompt
from gxpo_trainer.weights.buckets import BucketPacker, SyncReport
from gxpo_trainer.weights.transports import SharedMemoryPublisher

pytestmark = pytest.mark.engine

SAMPLING = SamplingSettings(max_new_tokens=24)
TINY = 1e-7
"""Size of a weight change at learning rate 1e-7."""


@dataclass
class Pair:
    """A learner's side (a transformers model and a publisher) and a sampler actor."""

    folder: Path
    tied: bool
    model: PreTrainedModel
    publisher: SharedMemoryPublisher
    actor: Any
    version: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def change(self, size: float) -> None:
        torch.manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * size)

    def sync(self, capacity: int = WEIGHT_BUCKET_BYTES) -> SyncReport:
        """Publish the model's weights and load them, bucket by bucket."""
        self.version += 1
        packer = BucketPacker(self.model.named_parameters(), capacity=capacity)
        index = 0
        while True:
            bucket = self.publisher.publish(packer, self.version, index)
            report = ray.get(self.actor.receive.remote(bucket))
            index += 1
            if bucket.last:
                return report

    def generate(self, requests: Sequence[SampleRequest], sampling: SamplingSettings = SAMPLING) -> list[Group]:
        stream = self.actor.generate.options(num_returns="streaming").remote(requests, sampling, self.version)
        return [group for reference in stream for group in ray.get(reference)]

    def requests(self, num_prompts: int = 6, length: int | None = None, seeded: bool = False) -> list[SampleRequest]:
        made = []
        for index in range(num_prompts):
            size = length or int(self.rng.integers(5, 60))
            ids = self.rng.integers(FIRST_LETTER, FIRST_LETTER + len(LETTERS), size).astype(np.int32)
            made.append(SampleRequest(Prompt(str(index), "", ""), ids, 2 + index % 3, index if seeded else None))
        return made

    def expected(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """log π of tokens 1 … by transformers, one sequence at a time: float32[length - 1]."""
        ids = torch.from_numpy(token_ids.astype(np.int64))
        with torch.no_grad():
            table = torch.log_softmax(self.model(ids[None]).logits[0, :-1] / temperature, dim=-1)
        return table.gather(1, ids[1:, None])[:, 0].numpy()

    def gaps(self, groups: Sequence[Group], temperature: float = 1.0) -> np.ndarray:
        found = []
        for group in groups:
            for sample in group.samples:
                whole = np.concatenate([group.prompt_token_ids, sample.token_ids])
                wanted = self.expected(whole, temperature)[len(group.prompt_token_ids) - 1 :]
                found.append(np.abs(wanted.astype(np.float64) - sample.logprobs))
        return np.concatenate(found)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, _node_ip_address="127.0.0.1")
    ray.cloudpickle.register_pickle_by_value(sampler_actor)
    yield
    ray.cloudpickle.unregister_pickle_by_value(sampler_actor)
    if started:
        ray.shutdown()


def start_actor(folder: Path, tensor_parallel: int = 1) -> Any:
    settings = SamplerSettings(
        model=str(folder),
        max_length=128,
        dtype="float32",
        threads=1,
        max_num_seqs=64,
        tensor_parallel=tensor_parallel,
    )
    options = {"num_cpus": 0.5, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
    return remote_sampler(BreakableSamplerActor).options(**options).remote(settings)


@pytest.fixture(
    scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.long("the other kind of head"))]
)
def pair(request: pytest.FixtureRequest, cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    torch.set_num_threads(1)
    model = save_policy(folder, tied=request.param == "tied")
    found = Pair(folder, request.param == "tied", model, SharedMemoryPublisher(), start_actor(folder))
    found.sync()
    yield found
    ray.kill(found.actor)
    found.publisher.close()


def test_logprobs_agree_with_transformers_after_every_sync(pair: Pair) -> None:
    for _ in range(4):
        report = pair.sync()
        gaps = pair.gaps(pair.generate(pair.requests()))
        assert gaps.mean() <= 1e-6
        assert gaps.max() <= 1e-4
        # Every published tensor was compared; a tied head is one comparison more, through its packed copy.
        assert report.num_checked == len(list(pair.model.named_parameters())) + pair.tied
        pair.change(1e-3)


def test_a_version_may_come_in_many_buckets(pair: Pair) -> None:
    """Tensors are split by rows and fused layers between buckets; the model is 1.2 MB."""
    pair.change(1e-3)
    report = pair.sync(capacity=50_000)
    assert pair.gaps(pair.generate(pair.requests())).mean() <= 1e-6
    assert report.num_bytes >= sum(p.numel() * 4 for p in pair.model.parameters())
    ray.get(pair.actor.break_sync.remote("stale sampler"))
    pair.change(TINY)
    with pytest.raises(WeightSyncMismatch, match="the learner published checksum"):
        pair.sync(capacity=50_000)
    ray.get(pair.actor.restore.remote())
    pair.sync()


def test_each_worker_of_a_split_engine_verifies_its_own_part(cluster: None, tmp_path: Path) -> None:
    """Tensors come in pieces of rows; then the second of two workers alone keeps its old weights."""
    split = Pair(tmp_path, True, save_policy(tmp_path, tied=True), SharedMemoryPublisher(), start_actor(tmp_path, 2))
    try:
        split.sync()
        split.change(1e-3)
        split.sync(capacity=50_000)
        assert split.gaps(split.generate(split.requests())).mean() <= 1e-6
        ray.get(split.actor.break_sync.remote("stale sampler", rank=1))
        split.change(TINY)
        with pytest.raises(WeightSyncMismatch, match="the learner published checksum"):
            split.sync(capacity=50_000)
        ray.get(split.actor.restore.remote())
        split.sync()
    finally:
        ray.kill(split.actor)
        split.publisher.close()


def test_a_model_with_experts_is_refused_at_its_first_sync(cluster: None, tmp_path: Path) -> None:
    """vLLM keeps all experts of a layer in one tensor of its own layout, which no published tensor can be compared
    with."""
    experts = Pair(tmp_path, False, save_experts(tmp_path), SharedMemoryPublisher(), start_actor(tmp_path))
    try:
        with pytest.raises(
            ConfigError, match=r"no place for model\.layers\.0\.mlp\.experts\.gate_up_proj.*not supported"
        ):
            experts.sync(capacity=50_000)
        with pytest.raises(WeightSyncMismatch, match="holds no verified version"):
            experts.generate(experts.requests())
    finally:
        ray.kill(experts.actor)
        experts.publisher.close()


def test_logprobs_are_those_at_the_sampling_temperature(pair: Pair) -> None:
    pair.sync()
    groups = pair.generate(pair.requests(), SamplingSettings(max_new_tokens=8, temperature=0.6))
    assert pair.gaps(groups, temperature=0.6).mean() <= 1e-6
    assert pair.gaps(groups, temperature=1.0).mean() > 0.1


def test_every_group_comes_once_and_whole_whatever_the_order(pair: Pair) -> None:
    pair.sync()
    requests = pair.requests(num_prompts=9)
    groups = {group.prompt.id: group for group in pair.generate(requests)}
    assert sorted(groups) == sorted(request.prompt.id for request in requests)
    for request in requests:
        group = groups[request.prompt.id]
        assert len(group.samples) == request.num_samples
        assert np.array_equal(group.prompt_token_ids, request.prompt_token_ids)
        assert group.weights_version == pair.version
        for sample in group.samples:
            assert sample.token_ids.dtype == np.int32
            assert sample.logprobs.dtype == np.float32
            assert sample.token_ids.shape == sample.logprobs.shape
            ended = [int(token) == END for token in sample.token_ids]
            assert not any(ended[:-1])
            assert sample.finish_reason == ("stop" if ended[-1] else "length")
            assert ended[-1] or len(ended) == SAMPLING.max_new_tokens
            letters = [LETTERS[t - FIRST_LETTER] for t in sample.token_ids if t >= FIRST_LETTER]
            assert list(sample.text.replace("<unk>", "")) == letters


def test_seeded_samples_do_not_depend_on_the_rest_of_the_batch(pair: Pair) -> None:
    pair.sync()
    requests = pair.requests(num_prompts=8, seeded=True)
    together = {g.prompt.id: g for g in pair.generate(requests)}
    reversed_ = {g.prompt.id: g for g in pair.generate(requests[::-1])}
    alone = {g.prompt.id: g for g in pair.generate(requests[3:4])}
    for other in (reversed_, alone):
        for name, group in other.items():
            for one, two in zip(group.samples, together[name].samples, strict=True):
                assert np.array_equal(one.token_ids, two.token_ids)
    distinct = {sample.token_ids.tobytes() for group in together.values() for sample in group.samples}
    assert len(distinct) == sum(request.num_samples for request in requests)


def test_score_agrees_with_transformers(pair: Pair) -> None:
    pair.change(1e-3)
    pair.sync()
    lists = [request.prompt_token_ids for request in pair.requests()]
    scores = ray.get(pair.actor.score.remote(lists))
    for ids, score in zip(lists, scores, strict=True):
        assert score.shape == (len(ids) - 1,)
        assert np.abs(pair.expected(ids) - score).max() <= 1e-5


def test_another_version_is_refused(pair: Pair) -> None:
    pair.sync()
    pair.version += 1
    with pytest.raises(WeightSyncMismatch, match=f"the sampler holds version {pair.version - 1}"):
        pair.generate(pair.requests())


def test_a_prompt_without_room_for_its_response_is_refused(pair: Pair) -> None:
    pair.sync()
    with pytest.raises(ValueError, match=r"prompt 0 has 120 tokens.*model.max_length = 128"):
        pair.generate(pair.requests(num_prompts=1, length=120))


def test_closing_a_generator_early_leaves_the_engine_clean(pair: Pair) -> None:
    pair.sync()
    requests = pair.requests(num_prompts=6)
    assert ray.get(pair.actor.close_early.remote(requests, SAMPLING, pair.version)) >= 1
    assert len(pair.generate(requests)) == 6


def test_prefix_cache_of_earlier_weights_is_never_used(pair: Pair) -> None:
    requests = pair.requests(length=70)  # two full blocks of 32
    pair.sync()
    pair.generate(requests)
    pair.change(1e-2)
    pair.sync()
    assert pair.gaps(pair.generate(requests)).mean() <= 1e-6
    # And the cache is really in use: when two versions share their key, the old entries are found and show.
    pair.change(1e-2)
    pair.sync()
    ray.get(pair.actor.break_sync.remote("same cache"))
    assert pair.gaps(pair.generate(requests)).mean() > 1e-4


@pytest.mark.parametrize("fault", ["stale sampler", "stale head", "swapped tensors"])
def test_a_broken_sync_is_caught_at_learning_rate_1e_7(pair: Pair, fault: str) -> None:
    if fault == "stale head" and not pair.tied:
        pytest.skip("an untied head is a weight of its own, loaded and packed like every other")
    pair.sync()
    pair.change(TINY)
    prefix = "model.layers.1.self_attn"
    ray.get(pair.actor.break_sync.remote(fault, (f"{prefix}.k_proj.weight", f"{prefix}.v_proj.weight")))
    place = {
        "stale sampler": r"weight \S+: .* elements differ, at most by \d(\.\d+)?e-0[67]",
        "stale head": r"weight model.embed_tokens.weight: .* lm_head \(packed copy\).* at most by \d(\.\d+)?e-0[67]",
        "swapped tensors": r"weight model.layers.1.self_attn.[kv]_proj.weight: .* elements differ",
    }[fault]
    with pytest.raises(WeightSyncMismatch, match=place):
        pair.sync()
    # A sampler that failed its proof answers for no version, not even the one before.
    with pytest.raises(WeightSyncMismatch, match="holds no verified version"):
        pair.generate(pair.requests())
    ray.get(pair.actor.restore.remote())
    pair.sync()
    assert pair.gaps(pair.generate(pair.requests())).mean() <= 1e-6


def test_tensors_swapped_by_a_change_of_1e_7_alone_are_told_apart(pair: Pair) -> None:
    """Two tensors that differ by 1e-7 everywhere, exchanged: no log-probability could show it."""
    first, second = (f"model.layers.{i}.mlp.down_proj.weight" for i in range(2))
    parameters = dict(pair.model.named_parameters())
    before = parameters[second].detach().clone()
    with torch.no_grad():
        parameters[second].copy_(parameters[first] + TINY * torch.randn_like(before))
    ray.get(pair.actor.break_sync.remote("swapped tensors", (first, second)))
    with pytest.raises(WeightSyncMismatch, match=r"mlp.down_proj.weight: .* at most by \d(\.\d+)?e-07"):
        pair.sync()
    ray.get(pair.actor.restore.remote())
    with torch.no_grad():
        parameters[second].copy_(before)
    pair.sync()


def test_a_single_last_bit_is_seen_in_every_tensor(pair: Pair) -> None:
    pair.sync()
    for name, parameter in pair.model.named_parameters():
        pair.sync()
        place = int(pair.rng.integers(parameter.numel()))
        with torch.no_grad():
            flat = parameter.view(-1)
            flat[place] = torch.nextafter(flat[place], torch.tensor(torch.inf))
        ray.get(pair.actor.break_sync.remote("stale sampler"))
        with pytest.raises(WeightSyncMismatch, match=f"weight {name}: .*; 1 elements differ"):
            pair.sync()
        ray.get(pair.actor.restore.remote())
    pair.sync()


def test_without_the_proof_a_stale_head_goes_unnoticed_by_the_version(pair: Pair) -> None:
    """What the packed readback is for: the same fault with the proof switched off shows only in the gap."""
    if not pair.tied:
        pytest.skip("an untied head has no copy to go stale")
    pair.sync()
    pair.change(1e-3)
    ray.get(pair.actor.break_sync.remote("stale head"))
    ray.get(pair.actor.break_sync.remote("blind"))
    pair.sync()
    gap = pair.gaps(pair.generate(pair.requests())).mean()
    ray.get(pair.actor.restore.remote())
    assert gap > 1e-4
    pair.sync()


def test_the_map_of_names_agrees_with_vllms_own_loader(pair: Pair) -> None:
    """Another folder's weights, loaded by vLLM itself at start-up, are the reference; a permuted folder is refused."""
    assert sorted(name for name in ray.get(pair.actor.names.remote())) == sorted(
        name for name, _ in pair.model.named_parameters()
    )
    other = pair.folder.parent / f"{pair.folder.name}-other"
    save_policy(other, tied=pair.tied, seed=1)
    with pytest.raises(WeightSyncMismatch, match="the learner published checksum"):
        ray.get(pair.actor.verify_checkpoint.remote(str(other)))
    pair.sync()


def test_weights_that_are_not_finite_are_named(pair: Pair) -> None:
    pair.sync()
    bad = [(name, parameter.detach().clone()) for name, parameter in pair.model.named_parameters()]
    bad[1][1].view(-1)[0] = torch.nan
    bucket = pair.publisher.publish(BucketPacker(iter(bad)), pair.version + 1, 0)
    with pytest.raises(WeightSyncMismatch, match="not finite"):
        ray.get(pair.actor.receive.remote(bucket))
    pair.sync()


# One head is enough: a death knows nothing of heads.
@pytest.mark.parametrize("pair", ["tied"], indirect=True)
def test_a_killed_sampler_is_made_again_and_leaves_nothing(pair: Pair) -> None:
    pair.change(1e-3)
    pair.sync()
    before = sorted(path.name for path in Path("/dev/shm").glob("gxpo-*"))
    os.kill(ray.get(pair.actor.pid.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        pair.generate(pair.requests())
    assert sorted(path.name for path in Path("/dev/shm").glob("gxpo-*")) == before
    pair.actor = start_actor(pair.folder)
    assert ray.get(pair.actor.status.remote())["version"] is None
    # The folder's weights are older than the learner's: only a sync makes it answer.
    with pytest.raises(WeightSyncMismatch, match="holds no verified version"):
        pair.generate(pair.requests())
    pair.sync()
    assert pair.gaps(pair.generate(pair.requests())).mean() <= 1e-6


def test_a_bucket_of_a_closed_publisher_is_refused(pair: Pair) -> None:
    publisher = SharedMemoryPublisher()
    bucket = publisher.publish(BucketPacker(pair.model.named_parameters()), 99, 0)
    publisher.close()
    with pytest.raises(WeightSyncMismatch, match="publisher has closed, or learner and sampler are on different hosts"):
        ray.get(pair.actor.receive.remote(bucket))
    pair.sync()
