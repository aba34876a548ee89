"""The vLLM sampler behind its Ray actor against transformers and PEFT, and every way in which a sync can go wrong."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from peft import LoraConfig as PeftConfig, get_peft_model
from support.rollouts import token_logprobs
from support.tiny_families import LETTERS, SPECIAL, save_family, save_tokenizer
from support.tiny_policy import qwen2
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.engines import WEIGHT_BUCKET_BYTES
from gxpo_trainer.errors import WeightSyncMismatch
from gxpo_trainer.learner.checkpoint import adapter_weights
from gxpo_trainer.rollout.sampler import SamplerActor, SamplerSettings, remote_sampler
from gxpo_trainer.rollout.vllm_driver import Intake, SampleRequest, SamplingSettings
from gxpo_trainer.types import Group, Prompt
from gxpo_trainer.weights.buckets import BucketPacker, SyncReport
from gxpo_trainer.weights.transports import SharedMemoryPublisher

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_on_loopback")]

SAMPLING = SamplingSettings(max_new_tokens=24)
TINY = 1e-7
"""Size of a weight change at learning rate 1e-7."""
TARGETS = ("q_proj", "k_proj", "o_proj", "down_proj")
Weights = Iterator[tuple[str, torch.Tensor]]


class BreakableSamplerActor(SamplerActor):
    """`break_sync` replaces one step of the next syncs, in one worker where it is the workers'; `restore` undoes it."""

    def break_sync(self, fault: str, swap: tuple[str, str] = ("", ""), rank: int = 0) -> None:
        engine, weights = self._llm.llm_engine, self.weights

        def scaled_twice(request: Any) -> Any:
            result = type(engine).add_lora(engine, request)
            self._llm.collective_rpc(double_adapter)
            return result

        def swapped(lora: Any) -> Any:
            matrices = weights.matrices
            first, second = sorted(name for name in matrices if name.endswith("q_proj.lora_B.weight"))[:2]
            (one, own), (other, its) = matrices[first], matrices[second]
            matrices |= {first: (other, own), second: (one, its)}
            return type(weights).write_adapter(weights, lora)

        if fault == "same cache":
            earlier = f"sync-{weights.num_syncs - 1}"
            self._driver.weights = self._driver.current_weights._replace(cache_salt=earlier)
        elif fault == "stale adapter":
            engine.add_lora = lambda request: True
        elif fault == "wrong scaling":
            engine.add_lora = scaled_twice
        elif fault == "swapped matrices":
            weights.write_adapter = swapped
        else:
            self._llm.collective_rpc(break_worker, args=(fault, swap, rank))

    def restore(self) -> None:
        vars(self._llm.llm_engine).pop("add_lora", None)
        vars(self.weights).pop("write_adapter", None)
        self._llm.collective_rpc(restore_worker)

    def emulate_sleep(self) -> None:
        """From now on the engine sleeps and wakes as on a GPU that it shares; see `emulate_sleep`."""
        self._settings = replace(self._settings, device="gpu", colocated=True)
        self._llm.collective_rpc(emulate_sleep)

    def watch_routing(self) -> None:
        self._llm.collective_rpc(watch_routing)

    def routing(self) -> dict[str, torch.Tensor]:
        """Router logits [tokens, experts] by layer, of all tokens since `watch_routing` or the last call."""
        routed = self._llm.collective_rpc(take_routing)[0]
        return {path: torch.cat(passes) for path, passes in routed.items()}

    def verify_checkpoint(self, folder: str) -> int:
        return sum(self.weights.call_workers("verify_checkpoint", folder))

    def names(self) -> tuple[str, ...]:
        return tuple(self._llm.collective_rpc(lambda worker: [*worker.gxpo_receiver.weights.slots])[0])

    def generate(
        self, requests: Sequence[SampleRequest], sampling: SamplingSettings, version: int
    ) -> Iterator[tuple[Group, ...]]:
        for finished in self.sample(Intake(list(enumerate(requests)), closed=True), sampling, version):
            yield tuple(group for _, group in finished.groups)

    def close_early(self, requests: Sequence[SampleRequest], sampling: SamplingSettings, version: int) -> int:
        """Take one yield, close the stream; the number of its groups."""
        stream = self.sample(Intake(list(enumerate(requests)), closed=True), sampling, version)
        first = next(stream)
        stream.close()
        return len(first.groups)


def double_adapter(worker: Any) -> None:
    for module in worker.model_runner.get_model().modules():
        for stacked in getattr(module, "lora_b_stacked", ()):
            stacked.mul_(2)


class AsynchronousSamplerActor(BreakableSamplerActor):
    """Its engine schedules a step before it has the last one's tokens, as on GPUs; vLLM turns that off on CPUs."""

    def __init__(self, *arguments: Any) -> None:
        from vllm.platforms.cpu import CpuPlatform

        check: Any = CpuPlatform.check_and_update_config

        def kept(config: Any) -> None:
            check(config)
            config.scheduler_config.async_scheduling = True

        CpuPlatform.check_and_update_config = staticmethod(kept)  # type: ignore[method-assign, assignment]
        super().__init__(*arguments)

    def hold(self, tokens: int) -> None:
        """From now on the engine waits for version 2 when it has sampled so many tokens, and for 3 at twice as many."""
        step = self._driver.step

        def held() -> list[Any]:
            version = self._driver.current_weights.version
            return [] if version < 3 and self.tokens_so_far() >= version * tokens else step()

        self._driver.step = held

    @ray.method(concurrency_group="intake")
    def tokens_so_far(self) -> int:
        """Of the requests that are running."""
        return sum(len(response.token_ids) for response in [*self._driver.running.values()])

    def waiting_batches(self) -> int:
        """Steps that are scheduled and whose tokens have not come."""
        return len(self._llm.llm_engine.engine_core.engine_core.batch_queue)


def break_worker(worker: Any, fault: str, swap: tuple[str, str], rank: int) -> None:
    if worker.rank != rank:
        return
    weights = worker.gxpo_receiver.weights
    real_load = weights.load

    def swapped(published: Any) -> None:
        by_name = {entry.name: (entry, tensor) for entry, tensor in published}
        first, second = (by_name[name] for name in swap)
        real_load([*published, (first[0], second[1]), (second[0], first[1])])

    if fault == "stale sampler":
        weights.load = lambda published: None
    elif fault == "stale head":
        weights.repack_heads = lambda: None
    elif fault == "swapped tensors":
        weights.load = swapped
    else:
        raise ValueError(fault)


def emulate_sleep(worker: Any) -> None:
    """What vLLM does on a GPU at level 2: sleep frees weights and caches, and waking gives new memory without content;
    buffers alone come back. Memory without content is NaN here."""
    model, buffers = worker.model_runner.get_model(), dict[str, torch.Tensor]()

    def lose_weights() -> None:
        for module in model.modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.detach().fill_(torch.nan)
            if hasattr(module, "cpu_linear"):
                if not module.weight.numel():
                    shape = sum(module.output_partition_sizes), module.input_size
                    module.weight = torch.nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)
                module.quant_method.process_weights_after_loading(module)

    def sleep(level: int) -> None:
        assert level == 2
        buffers.update({name: buffer.clone() for name, buffer in model.named_buffers()})
        lose_weights()
        for cache in worker.model_runner.kv_caches:
            cache.fill_(torch.nan)

    def wake_up(tags: list[str]) -> None:
        if tags == ["weights"]:
            lose_weights()
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        else:
            assert tags == ["kv_cache"]
            for cache in worker.model_runner.kv_caches:
                cache.zero_()

    worker.sleep, worker.wake_up = sleep, wake_up


def watch_routing(worker: Any) -> None:
    worker.routed = {}

    def keep(path: str, output: Any) -> None:
        worker.routed.setdefault(path, []).append(output[0].detach().float())

    for path, module in worker.model_runner.get_model().named_modules():
        if path.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, __, output, path=path: keep(path, output))


def take_routing(worker: Any) -> dict[str, list[torch.Tensor]]:
    routed: dict[str, list[torch.Tensor]]
    routed, worker.routed = worker.routed, {}
    return routed


def restore_worker(worker: Any) -> None:
    for name in ("load", "repack_heads"):
        vars(worker.gxpo_receiver.weights).pop(name, None)


def save_policy(folder: Path, *, tied: bool, seed: int = 0) -> Qwen2ForCausalLM:
    """A random Qwen2 (2 layers, width 128) with a letter-by-letter tokenizer, saved to `folder`."""
    tokens = save_tokenizer(folder)
    torch.manual_seed(seed)
    others = {"max_position_embeddings": 256, "initializer_range": 0.06, "tie_word_embeddings": tied}
    model = qwen2(tokens.pop("vocab_size"), 128, 192, 2, 4, 2, **tokens, **others).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.05)
    model.save_pretrained(folder)
    return model


@dataclass
class Pair:
    """A learner's side (a transformers or PEFT model and a publisher) and a sampler actor. weights: what is synced."""

    folder: Path
    model: Any
    weights: Callable[[], Weights]
    actor: Any
    publisher: SharedMemoryPublisher = field(default_factory=SharedMemoryPublisher)
    version: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @property
    def tied(self) -> bool:
        return bool(self.model.config.tie_word_embeddings)

    def change(self, size: float) -> None:
        torch.manual_seed(self.version)
        with torch.no_grad():
            for _, tensor in self.weights():
                tensor.add_(torch.randn_like(tensor) * size)

    def sync(self, capacity: int = WEIGHT_BUCKET_BYTES, stream_id: int | None = None) -> SyncReport:
        """Publish the model's weights and load them, bucket by bucket. stream_id: of a stream that goes on."""
        self.version += 1
        packer, index = BucketPacker(self.weights(), capacity=capacity), 0
        while not packer.empty:
            bucket = self.publisher.publish(packer, self.version, index)
            receive = self.actor.receive.options(concurrency_group="weights") if stream_id else self.actor.receive
            report: SyncReport = ray.get(receive.remote(bucket, stream_id=stream_id))
            index += 1
        return report

    @contextmanager
    def broken(self, fault: str, *arguments: Any, **options: Any) -> Iterator[None]:
        """Syncs go wrong within the block; then one that goes right is made."""
        ray.get(self.actor.break_sync.remote(fault, *arguments, **options))
        yield
        ray.get(self.actor.restore.remote())
        self.sync()

    def generate(self, requests: Sequence[SampleRequest], sampling: SamplingSettings = SAMPLING) -> list[Group]:
        stream = self.actor.generate.options(num_returns="streaming").remote(requests, sampling, self.version)
        return [group for reference in stream for group in ray.get(reference)]

    def requests(self, num_prompts: int = 6, length: int | None = None, seeded: bool = False) -> list[SampleRequest]:
        made = []
        for index in range(num_prompts):
            size = length or int(self.rng.integers(5, 60))
            ids = self.rng.integers(len(SPECIAL), len(SPECIAL) + len(LETTERS), size).astype(np.int32)
            made.append(SampleRequest(Prompt(str(index), "", ""), ids, 2 + index % 3, index if seeded else None))
        return made

    def gaps(self, groups: Sequence[Group] | None = None, temperature: float = 1.0) -> np.ndarray:
        """|log π_model − log π_sampler| of every sampled token; of new groups unless some are given."""
        gaps = []
        for group in self.generate(self.requests()) if groups is None else groups:
            for sample in group.samples:
                expected = token_logprobs(self.model, group.prompt_token_ids, sample.token_ids, temperature)
                gaps.append(np.abs(expected.astype(np.float64) - sample.logprobs))
        return np.concatenate(gaps)


@contextmanager
def started(
    folder: Path,
    model: Any,
    weights: Callable[[], Weights] | None = None,
    kind: type[SamplerActor] = BreakableSamplerActor,
    **parts: Any,
) -> Iterator[Pair]:
    """An engine on the folder that has not been synced yet. weights: None for the model's own."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    torch.set_num_threads(1)
    config = RunConfig.model_validate({"model": {"max_length": 128}, "rollout": {"max_num_seqs": 64}, **parts})
    chosen = SamplerSettings(config, str(folder))
    options = {"num_cpus": 0.5, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
    actor = remote_sampler(kind).options(**options).remote(chosen)
    pair = Pair(folder, model, weights or model.named_parameters, actor)
    try:
        # The folder's weights may be older than the learner's: only a sync makes an engine answer.
        with pytest.raises(WeightSyncMismatch, match="holds no verified version"):
            pair.generate(pair.requests())
        yield pair
    finally:
        ray.kill(actor)
        pair.publisher.close()


@pytest.fixture(scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.long("the other head"))])
def pair(
    request: pytest.FixtureRequest, ray_on_loopback: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    with started(folder, save_policy(folder, tied=request.param == "tied")) as made:
        made.sync()
        yield made


def test_logprobs_agree_with_transformers_after_every_sync(pair: Pair) -> None:
    for _ in range(4):
        report = pair.sync()
        gaps = pair.gaps()
        assert gaps.mean() <= 1e-6
        assert gaps.max() <= 1e-4
        # Every published tensor was compared; a tied head is one comparison more, through its packed copy.
        assert report.num_checked == len(list(pair.model.named_parameters())) + pair.tied
        pair.change(1e-3)
    pair.sync()
    lists = [request.prompt_token_ids for request in pair.requests()]
    for ids, score in zip(lists, ray.get(pair.actor.score.remote(lists)), strict=True):
        assert score.shape == (len(ids) - 1,)
        assert np.abs(token_logprobs(pair.model, ids[:1], ids[1:]) - score).max() <= 1e-5
    groups = pair.generate(pair.requests(), SamplingSettings(max_new_tokens=8, temperature=0.6))
    assert pair.gaps(groups, temperature=0.6).mean() <= 1e-6
    assert pair.gaps(groups, temperature=1.0).mean() > 0.1


def test_a_stop_text_ends_a_response_before_itself(pair: Pair) -> None:
    """With top_k = 1 all samples of a prompt are the likeliest one; a token is a letter."""
    requests = pair.requests()
    greedy = SamplingSettings(max_new_tokens=16, top_k=1)
    whole = {group.prompt.id: group.samples[0] for group in pair.generate(requests, greedy)}
    stopped = 0
    for request in requests:
        stop = whole[request.prompt.id].text[4:6]
        if len(stop) < 2:
            continue
        (group,) = pair.generate([request], replace(greedy, stop=(stop,)))
        for sample in group.samples:
            assert sample.text == whole[request.prompt.id].text.partition(stop)[0]
            assert sample.finish_reason == "stop"
            assert sample.token_ids.tolist() == whole[request.prompt.id].token_ids[: len(sample.token_ids)].tolist()
            assert len(sample.token_ids) < 16
            stopped += 1
    assert stopped


def test_every_group_comes_once_and_whole_whatever_the_order(pair: Pair) -> None:
    requests = pair.requests(num_prompts=9)
    groups = {group.prompt.id: group for group in pair.generate(requests)}
    assert sorted(groups) == sorted(request.prompt.id for request in requests)
    for request in requests:
        group = groups[request.prompt.id]
        assert (len(group.samples), group.weights_version) == (request.num_samples, pair.version)
        assert np.array_equal(group.prompt_token_ids, request.prompt_token_ids)
        for sample in group.samples:
            ended = [int(token) == SPECIAL["<end>"] for token in sample.token_ids]
            assert not any(ended[:-1])
            assert sample.finish_reason == ("stop" if ended[-1] else "length")
            assert ended[-1] or len(ended) == SAMPLING.max_new_tokens


def test_what_cannot_be_sampled_is_refused_and_an_early_close_leaves_the_engine_clean(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"prompt 0 has 120 tokens.*model.max_length = 128"):
        pair.generate(pair.requests(num_prompts=1, length=120))
    requests = pair.requests()
    assert ray.get(pair.actor.close_early.remote(requests, SAMPLING, pair.version)) >= 1
    assert len(pair.generate(requests)) == 6
    pair.version += 1
    with pytest.raises(WeightSyncMismatch, match=f"the sampler holds version {pair.version - 1}"):
        pair.generate(requests)
    pair.sync()


def test_prefix_cache_of_earlier_weights_is_never_used(pair: Pair) -> None:
    requests = pair.requests(length=70)  # two full blocks of 32
    pair.sync()
    pair.generate(requests)
    pair.change(1e-2)
    pair.sync()
    assert pair.gaps(pair.generate(requests)).mean() <= 1e-6
    # And the cache is really in use: when two versions share their key, the old entries are used and show.
    pair.change(1e-2)
    pair.sync()
    with pair.broken("same cache"):
        assert pair.gaps(pair.generate(requests)).mean() > 1e-4


def test_a_version_may_come_in_many_buckets(pair: Pair) -> None:
    """Tensors are split by rows and fused layers between buckets; the model is 1.2 MB."""
    pair.change(1e-3)
    pair.sync(capacity=50_000)
    assert pair.gaps().mean() <= 1e-6
    with pair.broken("stale sampler"):
        pair.change(TINY)
        with pytest.raises(WeightSyncMismatch, match="the learner published checksum"):
            pair.sync(capacity=50_000)


@pytest.mark.long("the order of sleep, sync and waking: tests/unit/runtime/test_shared_devices.py")
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "phi3", "qwen3_moe"])
def test_a_sync_brings_back_all_that_a_sleeping_engine_has_lost(tmp_path: Path, family: str) -> None:
    folder = save_family(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    with started(folder, model) as shared:
        ray.get(shared.actor.emulate_sleep.remote())
        for _ in range(2):
            ray.get(shared.actor.sleep.remote(discard_weights=True))
            ray.get(shared.actor.wake.remote("weights"))
            shared.sync()
            ray.get(shared.actor.wake.remote("kv_cache"))
            assert shared.gaps().max() <= 1e-4
            shared.change(1e-3)
        # A sync before the weights have memory again is lost with it.
        ray.get(shared.actor.sleep.remote(discard_weights=True))
        shared.sync()
        ray.get(shared.actor.wake.remote("weights"))
        with pytest.raises(WeightSyncMismatch, match="the learner published checksum"):
            ray.get(shared.actor.verify_checkpoint.remote(str(folder)))


@pytest.mark.long("an engine of its own")
def test_late_tokens_of_an_engine_that_schedules_ahead_reach_no_other_version(tmp_path: Path) -> None:
    """It is updated while it samples, and put to sleep with a step under way."""
    policy = save_policy(tmp_path, tied=True)
    with started(tmp_path, policy, kind=AsynchronousSamplerActor) as ahead:
        ahead.sync()
        models = {1: copy.deepcopy(policy)}
        ray.get(ahead.actor.hold.remote(200))
        stream = ahead.actor.stream.options(num_returns="streaming").remote(7, replace(SAMPLING, max_new_tokens=60), 1)
        ahead.actor.submit.remote(7, list(enumerate(ahead.requests(16, length=20))))
        for version in (2, 3):
            while ray.get(ahead.actor.tokens_so_far.remote()) < 200 * (version - 1):
                pass
            ahead.change(0.1)
            ahead.sync(stream_id=7)
            models[version] = copy.deepcopy(policy)
        ahead.actor.submit.remote(7, [], True)
        samples = [
            (group.prompt_token_ids, sample)
            for item in stream
            for _, group in ray.get(item).groups
            for sample in group.samples
        ]
        assert len(samples) == sum(2 + index % 3 for index in range(16))
        assert {version for _, sample in samples for version, _ in sample.versions} == {1, 2, 3}
        for prompt, sample in samples:
            begin = 0
            for version, count in sample.versions:
                expected = token_logprobs(models[version], prompt, sample.token_ids)[begin : begin + count]
                assert np.abs(expected - sample.logprobs[begin : begin + count]).max() <= 1e-4
                begin += count
            assert begin == len(sample.token_ids)

        ray.get(ahead.actor.emulate_sleep.remote())
        assert ray.get(ahead.actor.waiting_batches.remote())
        ray.get(ahead.actor.sleep.remote(discard_weights=True))
        ray.get(ahead.actor.wake.remote("weights"))
        ahead.sync()
        ray.get(ahead.actor.wake.remote("kv_cache"))
        assert ahead.gaps().max() <= 1e-4


@pytest.mark.long("an engine of its own")
@pytest.mark.parametrize(("dtype", "most", "gap"), [("float32", 0.0, 1e-5), ("bfloat16", 0.05, 0.05)])
def test_the_learner_chooses_the_experts_that_the_engine_chose(
    tmp_path: Path, dtype: str, most: float, gap: float
) -> None:
    """vLLM does not report them on CPUs; where they are the same, no part of the gap comes from the routing."""
    folder = save_family(tmp_path, "qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()

    def weights() -> Weights:
        return ((name, weight.to(getattr(torch, dtype))) for name, weight in model.named_parameters())

    with started(folder, model, weights, rollout={"dtype": dtype}) as shared:
        shared.sync()
        others, gaps = [], []
        ray.get(shared.actor.watch_routing.remote())
        for request in shared.requests(4, length=40):
            settings = SamplingSettings(max_new_tokens=80, ignore_eos=True)
            (group,) = shared.generate([replace(request, num_samples=1)], settings)
            engines = ray.get(shared.actor.routing.remote())
            tokens = torch.tensor([*request.prompt_token_ids, *group.samples[0].token_ids])[None, :-1]
            with torch.no_grad():
                own = model(tokens, output_router_logits=True).router_logits
            chosen = [
                [logits[: tokens.shape[1]].topk(2).indices.sort().values for logits in layers]
                for layers in (own, engines.values())
            ]
            different = [(mine != theirs).any(dim=-1) for mine, theirs in zip(*chosen, strict=True)]
            others.append(torch.stack(different).any(dim=0)[39:])
            gaps.append(torch.from_numpy(shared.gaps([group])))
    other, gap_of = torch.cat(others), torch.cat(gaps)
    assert other.float().mean() <= most
    assert gap_of.mean() <= gap
    assert gap_of[other].sum() <= 0.5 * gap_of.sum()


@pytest.mark.long("an engine of its own; the parts of a worker: tests/unit/weights/test_layout.py")
@pytest.mark.parametrize(("family", "workers"), [("qwen2", 2), ("phi3", 1), ("phi3", 2), ("qwen3_moe", 1)])
def test_each_worker_verifies_its_own_part(tmp_path: Path, family: str, workers: int) -> None:
    """Tensors come in pieces of rows; then the last worker alone keeps its old weights.

    Phi-3's checkpoint is fused too; experts lie in another order in vLLM's kernel, and one by one in the folder.
    """
    folder = save_family(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    with started(folder, model, placement={"tensor_parallel": workers}) as split:
        assert ray.get(split.actor.verify_checkpoint.remote(str(folder))) >= len(list(model.parameters()))
        split.sync()
        for _ in range(2):
            split.change(1e-3)
            split.sync(capacity=50_000)
            assert split.gaps().mean() <= 1e-6
        with split.broken("stale sampler", rank=workers - 1):
            split.change(TINY)
            with pytest.raises(WeightSyncMismatch, match="the learner published checksum"):
                split.sync(capacity=50_000)


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        ("stale sampler", r"weight \S+: .* elements differ, at most by \d(\.\d+)?e-0[67]"),
        ("stale head", r"weight model.embed_tokens.weight: .* lm_head \(packed copy\).* at most by \d(\.\d+)?e-0[67]"),
        ("swapped tensors", r"weight \S+down_proj.weight: .* elements differ, at most by \d(\.\d+)?e-07"),
    ],
)
def test_a_broken_sync_is_caught_at_learning_rate_1e_7(pair: Pair, fault: str, place: str) -> None:
    """The swapped tensors differ by 1e-7 everywhere, so that no log-probability could show it."""
    if fault == "stale head" and not pair.tied:
        pytest.skip("an untied head is a weight of its own, loaded and packed like every other")
    swap = tuple(f"model.layers.{i}.mlp.down_proj.weight" for i in range(2))
    first, second = (dict(pair.weights())[name] for name in swap)
    before = second.detach().clone()
    if fault == "swapped tensors":
        with torch.no_grad():
            second.copy_(first + TINY * torch.randn_like(first))
    pair.sync()
    with pair.broken(fault, swap):
        if fault != "swapped tensors":
            pair.change(TINY)
        with pytest.raises(WeightSyncMismatch, match=place):
            pair.sync()
        # A sampler that failed its proof answers for no version, not even the one before.
        with pytest.raises(WeightSyncMismatch, match="holds no verified version"):
            pair.generate(pair.requests())
        with torch.no_grad():
            second.copy_(before)
    assert pair.gaps().mean() <= 1e-6


def test_the_map_of_names_agrees_with_vllms_own_loader(pair: Pair) -> None:
    """Another folder's weights, loaded by vLLM itself at start-up, are the reference; a permuted folder is refused."""
    assert sorted(ray.get(pair.actor.names.remote())) == sorted(name for name, _ in pair.model.named_parameters())
    other = pair.folder.parent / f"{pair.folder.name}-other"
    save_policy(other, tied=pair.tied, seed=1)
    with pytest.raises(WeightSyncMismatch, match="the learner published checksum"):
        ray.get(pair.actor.verify_checkpoint.remote(str(other)))
    pair.sync()


def test_weights_that_are_not_finite_or_of_a_closed_publisher_are_refused(pair: Pair) -> None:
    bad = [(name, parameter.detach().clone()) for name, parameter in pair.model.named_parameters()]
    bad[1][1].view(-1)[0] = torch.nan
    bucket = pair.publisher.publish(BucketPacker(iter(bad)), pair.version + 1, 0)
    with pytest.raises(WeightSyncMismatch, match="not finite"):
        ray.get(pair.actor.receive.remote(bucket))
    closed = SharedMemoryPublisher()
    bucket = closed.publish(BucketPacker(pair.weights()), 99, 0)
    closed.close()
    with pytest.raises(WeightSyncMismatch, match="publisher has closed, or learner and sampler are on different hosts"):
        ray.get(pair.actor.receive.remote(bucket))
    pair.sync()


@pytest.fixture(scope="module")
def adapted(ray_on_loopback: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A PEFT model as the learner's side."""
    folder = tmp_path_factory.mktemp("adapted")
    base = save_policy(folder, tied=True)
    model = get_peft_model(base, PeftConfig(r=4, lora_alpha=8.0, target_modules=list(TARGETS)))
    lora = {"rank": 4, "alpha": 8.0, "target_modules": TARGETS}
    with started(folder, model, lambda: adapter_weights(model), learner={"lora": lora}) as made:
        yield made


def test_the_engine_follows_each_version_of_the_adapter(adapted: Pair) -> None:
    for _ in range(3):
        report = adapted.sync()
        assert adapted.gaps().max() <= 1e-4
        # Two matrices for each of four modules in two layers.
        assert report.num_checked == 2 * 4 * 2
        adapted.change(0.05)
    # Without the sync of the last change the engine is visibly behind.
    assert adapted.gaps().max() > 1e-4


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("stale adapter", "is not active in the sampler"),
        ("swapped matrices", "the sampler received other values than were published"),
        ("wrong scaling", r"LoRA matrix B of \S+: the sampler's differs from the learner's"),
    ],
)
def test_a_broken_adapter_sync_is_caught(adapted: Pair, fault: str, message: str) -> None:
    adapted.change(0.05)
    adapted.sync()
    with adapted.broken(fault):
        with pytest.raises(WeightSyncMismatch, match=message):
            adapted.sync()
        with pytest.raises(WeightSyncMismatch, match="holds no verified version"):
            adapted.gaps()
    assert adapted.gaps().max() <= 1e-4
