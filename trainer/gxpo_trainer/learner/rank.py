"""One rank of the learner as a Ray actor, and the weights that it publishes to the engines. `LearnerGroup` (group.py)
drives all ranks as one.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
import torch

from gxpo_trainer.algo.batch import StepBatch
from gxpo_trainer.config import GrpoRule, RunConfig
from gxpo_trainer.config.engines import Transport
from gxpo_trainer.learner.checkpoint import adapter_weights, full_weights, write_adapter, write_policy
from gxpo_trainer.learner.logprobs import whole_shape
from gxpo_trainer.rules.contract import BufferingRule, make_rule, snapshot, sum_over
from gxpo_trainer.rules.diagnostics import diagnose as take_diagnostics
from gxpo_trainer.runtime.processes import frozen_allocations, peak_resident_bytes, settle_kernels, write_errors
from gxpo_trainer.runtime.ray_session import trace_this_process
from gxpo_trainer.types import Metrics, StepReport
from gxpo_trainer.weights.buckets import BucketPacker, ChangeMeter, WeightBucket
from gxpo_trainer.weights.transports import make_publisher

Stage = Literal["warm_start", "first", "run"]
"""Of a training step: a supervised one before the run, the run's first after such steps, any other."""
PIECE = 1 << 20
"""Elements of noise that are drawn at a time."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the learner reports of one training step; passes are in units of the full step batch.

    gap_mean, gap_max: None where no token is in the loss.
    """

    metrics: Metrics
    backward_passes: float
    diagnostic_passes: float
    gap_mean: float | None
    gap_max: float | None
    finite: bool
    fallback: str | None
    update_s: float
    diagnostics_s: float
    peak_bytes: int
    """Largest resident set of this rank's process so far."""


def mean_metrics(parts: Sequence[Metrics]) -> Metrics:
    """Each metric's mean over the parts that have it, in the order in which they come."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {name: sum(column) / len(column) for name, column in values.items()}


class LearnerRank:
    """One rank in its own process. `setup` once, then `train_step`, `publish`, `save` in any order."""

    def __init__(self, config: RunConfig, rank: int, world_size: int) -> None:
        self.config, self.rank, self.world_size = config, rank, world_size
        self._unperturbed: list[torch.Tensor] | None = None
        """The weights before `perturb`, on the host."""
        self._packer: BucketPacker | None = None
        self._publishers: dict[Transport, Any] = {}
        self._changes: ChangeMeter | None = None

    def endpoint(self) -> tuple[str, int]:
        """An address and a free port of this host, for the ranks to meet at."""
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, int(probe.getsockname()[1])

    trace = staticmethod(trace_this_process)

    def setup(self, address: str, port: int, device: str, threads: int) -> str:
        """Build the engine. Heavy modules are imported here, in the actor's process alone.

        Returns the attention kernel and the layout of rows, for the log.
        """
        with frozen_allocations():
            torch.set_num_threads(threads)
            settle_kernels()
            from transformers import AutoModelForCausalLM  # noqa: F401

            from gxpo_trainer.learner.deepspeed_learner import DeepSpeedLearner

        self.learner = DeepSpeedLearner(
            self.config,
            rank=self.rank,
            world_size=self.world_size,
            master_address=address,
            master_port=port,
            device="gpu" if device == "gpu" else "cpu",
        )
        self.rule = make_rule(self.config.learner.rule)
        return self.learner.attention

    def train_step(
        self, batches: list[StepBatch], learning_rate: float, diagnose: bool, stage: Stage = "run"
    ) -> StepResult:
        """One rule step a mini-batch. batches: this rank's shares, one a mini-batch.

        A warm start takes plain optimizer steps; the step after it starts from a fresh optimizer. Metrics are means of
        the mini-batches that have them.
        """
        self.learner.set_learning_rate(learning_rate)
        begin = time.perf_counter()
        self.learner.load_batches(batches)
        extra: Metrics = {}
        diagnostic_passes = 0
        if stage == "first":
            self.learner.reset_optimizer()
        loaded = time.perf_counter()
        if diagnose:
            floor = self.config.diagnostics.noise_floor
            extra, diagnostic_passes = take_diagnostics(self.learner, self.rule, noise_floor=floor)
        measured = time.perf_counter()
        rule = make_rule(GrpoRule()) if stage == "warm_start" else self.rule
        reports: list[StepReport] = []
        for index in range(len(batches)):
            self.learner.use_batch(index)
            reports.append(rule.step(self.learner, last=index + 1 == len(batches)))
        gap_mean, gap_max = self.learner.logprob_gap()
        done = time.perf_counter()
        count = len(batches)
        return StepResult(
            metrics={
                **extra,
                **mean_metrics([report.metrics for report in reports]),
                **self.learner.own_metrics(),
            },
            backward_passes=sum(r.backward_passes for r in reports) / count,
            diagnostic_passes=diagnostic_passes / count,
            gap_mean=gap_mean,
            gap_max=gap_max,
            finite=all(r.finite for r in reports),
            fallback=next((r.fallback for r in reports if r.fallback), None),
            update_s=(loaded - begin) + (done - measured),
            diagnostics_s=measured - loaded,
            peak_bytes=peak_resident_bytes(),
        )

    def next_bucket(self, version: int, index: int, transport: Transport) -> tuple[WeightBucket | None, float | None]:
        """Pack bucket `index` of the present weights, or of the present adapter. Collective, as gathering is at ZeRO-3.

        Rank 0 (with cuda_ipc every rank) returns the bucket and, after the last one, the share of weights that differ
        from the version before (None for the first). Index 0 starts a version, also when the last one is unfinished.
        """
        model, adapted = self.learner.model, self.config.learner.lora is not None
        if index == 0:
            if self._packer is not None:
                self._packer.close()
            weights = adapter_weights if adapted else full_weights
            dtype = self.config.rollout.dtype
            self._packer = BucketPacker(weights(model), None if dtype == "auto" else getattr(torch, dtype))
        assert self._packer is not None, "bucket 0 comes first"
        if self.rank and transport != "cuda_ipc":
            self._packer.pack(None)
            return None, None
        publisher = self._publisher(transport)
        bucket: WeightBucket = publisher.publish(self._packer, version, index)
        if self.rank:
            return bucket, None
        if self._changes is None:
            sent = (p for name, p in model.named_parameters() if (".lora_" in name) == adapted)
            self._changes = ChangeMeter(sum(whole_shape(parameter).numel() for parameter in sent))
        return bucket, self._changes.add(bucket, publisher.buffer(bucket))

    def join_broadcast(self, address: str, port: int, size: int) -> None:
        """Open the broadcast group as its member 0; returns when every member has joined. Rank 0 only."""
        self._publisher("nccl").join(address, port, size)

    def send(self, bucket: WeightBucket) -> None:
        """Broadcast a packed bucket to the engines. Rank 0 only."""
        self._publisher("nccl").send(bucket)

    def _publisher(self, transport: Transport) -> Any:
        if transport not in self._publishers:
            self._publishers[transport] = make_publisher(transport, next(self.learner.model.parameters()).device)
        return self._publishers[transport]

    def trim(self) -> None:
        """Release what only a pass or a rule's step needs: its buffers, batches, gradients, and torch's cache."""
        if isinstance(self.rule, BufferingRule):
            self.rule.release_buffers()
        self.learner.trim()

    def park(self) -> int:
        """Move all persistent memory to the host; the bytes moved or dropped. No other call but `unpark` may follow."""
        if isinstance(self.rule, BufferingRule):
            self.rule.release_buffers()
        return self.learner.park()

    def unpark(self) -> None:
        """Undo `park` bit for bit."""
        self.learner.parking.unpark()

    @torch.no_grad()
    def perturb(self, scale: float, seed: int) -> None:
        """Canary: publish the present weights plus noise; a second call replaces the noise of the first. Collective.

        The noise is normal, `scale` times the mean absolute weight of the whole model: a LoRA factor that starts at
        zero is moved as well.
        """
        learner = self.learner
        if self._unperturbed is None:
            self._unperturbed = [shard.to("cpu", copy=True) for shard in learner.parameters()]
        snapshot(self._unperturbed, learner.parameters())
        total, count = sum_over(learner, lambda part: (part.abs(), torch.ones_like(part)), learner.parameters())
        # Copies of one shard must stay copies.
        owner = 0 if learner.replicated else learner.rank
        for index, shard in enumerate(learner.parameters()):
            generator = torch.Generator(device=shard.device).manual_seed(seed + 1000 * owner + index)
            for piece in torch.split(shard, PIECE):
                noise = torch.randn(piece.shape, generator=generator, device=piece.device, dtype=piece.dtype)
                piece.add_(noise, alpha=scale * (total / count))
        learner.publish()

    @torch.no_grad()
    def restore(self) -> None:
        """Undo `perturb` bit for bit. Collective."""
        if self._unperturbed is not None:
            snapshot(self._unperturbed, self.learner.parameters())
            self.learner.publish()
        self._unperturbed = None

    def gap(self, batch: StepBatch) -> tuple[float | None, float | None]:
        """Mean and largest log-prob gap to the sampler's scores of a batch. Changes no weights. Collective.

        At temperature 1, as vLLM scores prompts.
        """
        self.learner.load_batches([batch])
        self.learner.fix_old_logprobs(temperature=1.0)
        return self.learner.logprob_gap()

    def save(self, folder: str) -> dict[str, Any]:
        """Write this rank's part of a checkpoint; rank 0 the policy as well. Collective. Returns the rule's state.

        Raises OSError on the rank that cannot write; the others skip the rest.
        """
        root, model = Path(folder), self.learner.model
        parts = [
            lambda: self.learner.save(root / "learner"),
            lambda: write_policy(model, self.config, root / "policy", rank=self.rank),
        ]
        if self.config.learner.lora is not None:
            parts.append(lambda: write_adapter(model, root / "adapter", rank=self.rank))
        all(map(self._written, parts))
        return self.rule.state_dict()

    def _written(self, write: Callable[[], None]) -> bool:
        """Write a part that may fail on one rank alone; whether no rank failed. Collective: in what follows the others
        would wait for a rank that raised."""
        failure: Exception | None = None
        try:
            with write_errors():
                write()
        except Exception as error:
            failure = error
        failures = self.learner.all_reduce(torch.tensor([float(failure is not None)], dtype=torch.float64))
        if failure is not None:
            raise failure
        return float(failures[0]) == 0

    def load(self, folder: str, rule_state: dict[str, Any]) -> str | None:
        """Continue from `save`; see DeepSpeedLearner.load. Collective."""
        resharded = self.learner.load(Path(folder))
        self.rule.load_state_dict(rule_state)
        return resharded

    def close(self) -> None:
        """Release the published weights."""
        for publisher in self._publishers.values():
            publisher.close()
