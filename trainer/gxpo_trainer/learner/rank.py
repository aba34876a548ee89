"""One rank of the learner as a Ray actor. `LearnerGroup` (group.py) drives all of them as one."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from gxpo_trainer.algo.batch import StepBatch
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.engines import Transport
from gxpo_trainer.runtime.processes import frozen_allocations, peak_resident_bytes, write_errors
from gxpo_trainer.runtime.ray_session import TracedProcess, trace_this_process
from gxpo_trainer.types import Metrics, StepReport

if TYPE_CHECKING:
    from gxpo_trainer.learner.publisher import Perturbation
    from gxpo_trainer.weights.buckets import WeightBucket


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the learner reports of one training step; passes are in units of the full step batch."""

    metrics: Metrics
    backward_passes: float
    diagnostic_passes: float
    gap_mean: float
    gap_max: float
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
        self._at_close = ExitStack()

    def endpoint(self) -> tuple[str, int]:
        """An address and a free port of this host, for the ranks to meet at."""
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, int(probe.getsockname()[1])

    def pid(self) -> int:
        return os.getpid()

    def trace(self) -> TracedProcess:
        return trace_this_process()

    def setup(self, address: str, port: int, device: str, threads: int) -> None:
        """Build the engine. Heavy modules are imported here, in the actor's process alone."""
        with frozen_allocations():
            import torch

            torch.set_num_threads(threads)
            from transformers import AutoModelForCausalLM  # noqa: F401

            from gxpo_trainer.learner.deepspeed_learner import DeepSpeedLearner
            from gxpo_trainer.learner.publisher import RankPublisher
            from gxpo_trainer.rules.contract import make_rule

        self.learner = DeepSpeedLearner(
            self.config,
            rank=self.rank,
            world_size=self.world_size,
            master_address=address,
            master_port=port,
            device="gpu" if device == "gpu" else "cpu",
        )
        self.rule = make_rule(self.config.learner.rule)
        self.publisher = RankPublisher(self.learner, self.config)
        self._at_close.callback(self.publisher.close)
        self.perturbation: Perturbation | None = None

    def attention(self) -> str:
        """The attention kernel and the layout of rows, for the log."""
        return self.learner.attention

    def train_step(self, batches: list[StepBatch], learning_rate: float, diagnose: bool) -> StepResult:
        """One rule step a mini-batch. batches: this rank's shares, one a mini-batch.

        Metrics are means over the mini-batches that have them; passes are summed, in units of the full step batch.
        """
        self.learner.set_learning_rate(learning_rate)
        begin = time.perf_counter()
        self.learner.load_batches(batches)
        extra: Metrics = {}
        diagnostic_passes = 0
        loaded = time.perf_counter()
        if diagnose:
            from gxpo_trainer.rules.diagnostics import diagnose as take_diagnostics

            floor = self.config.diagnostics.noise_floor
            extra, diagnostic_passes = take_diagnostics(self.learner, self.rule, noise_floor=floor)
        measured = time.perf_counter()
        reports: list[StepReport] = []
        for index in range(len(batches)):
            self.learner.use_batch(index)
            reports.append(self.rule.step(self.learner, last=index + 1 == len(batches)))
        gap_mean, gap_max = self.learner.logprob_gap()
        done = time.perf_counter()
        count = len(batches)
        return StepResult(
            metrics={
                **extra,
                **mean_metrics([report.metrics for report in reports]),
                **self.learner.importance_metrics(),
                **self.learner.memory_metrics(),
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
        """Pack bucket `index` of the present weights, or of the present adapter. Collective.

        Rank 0 (with cuda_ipc every rank) returns the bucket and, after the last one, the fraction of weights, as the
        forward pass uses them, that differ from the version published before (None for the first).
        """
        return self.publisher.next_bucket(version, index, transport)

    def send(self, bucket: WeightBucket) -> None:
        """Broadcast a packed bucket to the engines. Rank 0 only."""
        self.publisher.send(bucket)

    def join_broadcast(self, address: str, port: int, size: int) -> None:
        """Open the broadcast group as its member 0. Rank 0 only."""
        self.publisher.join_broadcast(address, port, size)

    def park(self) -> int:
        """Move all persistent memory to the host; the bytes moved or dropped. No other call but `unpark` may follow."""
        from gxpo_trainer.rules.contract import BufferingRule

        if isinstance(self.rule, BufferingRule):
            self.rule.release_buffers()
        return self.learner.park(self.perturbation.before if self.perturbation else ())

    def unpark(self) -> None:
        """Undo `park` bit for bit."""
        self.learner.parking.unpark()

    def perturb(self, scale: float, seed: int) -> None:
        """Canary: see `publisher.Perturbation`. A second call replaces the perturbation of the first. Collective."""
        from gxpo_trainer.learner.publisher import Perturbation

        self.perturbation = self.perturbation or Perturbation(self.learner)
        self.perturbation.apply(scale, seed)

    def restore(self) -> None:
        """Undo `perturb` bit for bit. Collective."""
        if self.perturbation is not None:
            self.perturbation.undo()
        self.perturbation = None

    def gap(self, batch: StepBatch) -> tuple[float, float]:
        """Mean and largest log-prob gap to the sampler's scores of a batch. Changes no weights. Collective.

        At temperature 1, whatever `rollout.temperature` is: vLLM scores prompts with unscaled logits
        (`Sampler.score`).
        """
        self.learner.load_batch(batch)
        self.learner.fix_old_logprobs(temperature=1.0)
        return self.learner.logprob_gap()

    def save(self, folder: str) -> dict[str, Any]:
        """Write this rank's part of a checkpoint; rank 0 the policy as well. Collective. Returns the rule's state.

        Raises OSError on the rank that cannot write; the others skip the rest.
        """
        from gxpo_trainer.learner.publisher import write_adapter, write_policy

        root = Path(folder)
        if (
            self._written(lambda: self.learner.save(root / "learner"))
            and self._written(lambda: write_policy(self.learner, self.config, root / "policy"))
            and self.config.learner.lora is not None
        ):
            with write_errors():
                write_adapter(self.learner, root / "adapter")
        return self.rule.state_dict()

    def _written(self, write: Callable[[], None]) -> bool:
        """Write a part that may fail on one rank alone; whether no rank failed. Collective: what follows is collective
        too, and the others would wait in it for a rank that raised."""
        import torch

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
        """Release what `setup` has made; of a failed one nothing."""
        self._at_close.close()
