"""The learner for the controller: every call goes to all ranks at once (SPMD), and rank 0's result is returned.

When a rank dies its peers may hang in a collective, so the whole group is ended and rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from gxpo_trainer.algo.batch import StepBatch, shard
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.base import Phase
from gxpo_trainer.config.engines import Transport
from gxpo_trainer.errors import LearnerDied, Stalled
from gxpo_trainer.learner.rank import LearnerRank, Stage, StepResult
from gxpo_trainer.runtime.deaths import ACTOR_LOST
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.placement_group import result_of
from gxpo_trainer.runtime.ray_session import TracedProcess, end_stalled
from gxpo_trainer.runtime.shared_devices import Devices
from gxpo_trainer.weights.buckets import WeightBucket

MOST_STARTS = 5
"""Starts of a learner that died, within one recovery, on a Ray of several nodes."""
CLOSE_S = 30.0
"""Longest wait for the ranks to close, which takes a rank that can answer milliseconds."""


class LearnerGroup:
    """All ranks as one learner. For methods that have the name of one of LearnerRank see there.

    Order: `start`, then calls; after LearnerDied, which every method raises when a rank dies or stalls: `restart`, then
    `load` (or nothing, for the start policy).

    wait_for_one: waits until at least one of several calls is ready and returns those that are; asynchronous sampling
    serves the engines meanwhile. share: makes what decides who has the GPUs, where learner and engines share them.
    """

    def __init__(
        self,
        config: RunConfig,
        placement: Placement,
        *,
        wait_for_one: Callable[[Sequence[Any], Phase], Sequence[Any]] | None = None,
        share: Callable[[LearnerGroup], Devices] = lambda _: Devices(),
    ) -> None:
        self.config, self.placement = config, placement
        self.ranks: list[Any] = []
        self.devices = share(self)
        self.transport: Transport = placement.transport(one_node=config.placement.strategy != "split")
        self._wait_for_one = wait_for_one or placement.group.wait_for_one
        self.processes: list[TracedProcess] = []
        self._built = False
        self.attention = ""
        """The kernel and the layout of rows, once the ranks are built."""

    def start(self) -> None:
        """Start all ranks and wait until their engines are built."""
        self.devices.learner_starts()
        size = self.config.placement.learner_ranks
        self.ranks = [
            ray.remote(LearnerRank).options(**self.placement.learner_options(rank)).remote(self.config, rank, size)
            for rank in range(size)
        ]
        self.processes = self._all("trace", phase="setup")
        ((address, port),) = self._get([self.ranks[0].endpoint.remote()], "setup")
        settings = address, port, self.placement.device, self.placement.learner_threads
        self.attention = str(self._all("setup", *settings, phase="setup")[0])
        self._built = True

    def restart(self) -> None:
        """Kill the remaining ranks and start all again; on several nodes more than once, because Ray may not know yet
        that a node is lost."""
        for restarts in range(1, MOST_STARTS + 1):
            self.kill()
            self.placement.group.back_off(restarts)
            try:
                self.start()
                return
            except LearnerDied:
                if not self.placement.group.on_several_nodes or restarts == MOST_STARTS:
                    raise

    def kill(self) -> None:
        for rank in self.ranks:
            ray.kill(rank, no_restart=True)
        self.ranks, self.processes, self._built = [], [], False

    def close(self) -> None:
        """Let the ranks free what outlives them (shared memory), then end them, also those that hang in a collective.
        Ranks that are still being built have nothing to free."""
        if self._built and (calls := [rank.close.remote() for rank in self.ranks]):
            ray.wait(calls, num_returns=len(calls), timeout=CLOSE_S)
        self.kill()

    def park(self) -> None:
        self._all("park")

    def unpark(self) -> None:
        self._all("unpark")

    def trim(self) -> None:
        self._all("trim")

    def perturb(self, scale: float, seed: int) -> None:
        self.devices.need("updating")
        self._all("perturb", scale, seed)

    def restore(self) -> None:
        self.devices.need("updating")
        self._all("restore")

    def save(self, folder: Path) -> dict[str, Any]:
        """Fill a checkpoint folder; the rule's state. Raises OSError when a rank cannot write."""
        self.devices.need("updating")
        state: dict[str, Any] = self._all("save", str(folder), phase="checkpointing")[0]
        return state

    def load(self, folder: Path, rule_state: dict[str, Any]) -> str | None:
        """Continue from a checkpoint; what was resharded, None for the same layout."""
        self.devices.need("updating")
        resharded: str | None = self._all("load", str(folder), rule_state, phase="checkpointing")[0]
        return resharded

    def nodes(self) -> list[str]:
        """The Ray node of each rank."""
        return [process.node for process in self.processes]

    def next_bucket(self, version: int, index: int, nodes: Sequence[str]) -> tuple[WeightBucket, float | None]:
        """Pack bucket `index` of the present weights for engines on these Ray nodes."""
        if index == 0:
            one_node = {*nodes} == {self.nodes()[0]}
            self.transport = self.placement.transport(one_node=one_node)
            # An adapter is small and always goes through the host.
            if self.config.learner.lora is not None and self.transport in ("nccl", "cuda_ipc"):
                self.transport = "shared_memory" if one_node else "object_store"
        parts = self._all("next_bucket", version, index, self.transport, phase="syncing")
        bucket: WeightBucket = parts[0][0]
        if bucket.transport == "cuda_ipc":
            # A worker maps the bucket of the rank on its own GPU.
            bucket = replace(bucket, location={device: at for part, _ in parts for device, at in part.location.items()})
        return bucket, parts[0][1]

    @property
    def sender(self) -> Any:
        return self.ranks[0]

    def send(self, bucket: WeightBucket) -> Any:
        """Start the broadcast of a bucket; None for transports without one."""
        return self.ranks[0].send.remote(replace(bucket, tensors=())) if bucket.transport == "nccl" else None

    def open_broadcast(self, num_workers: int) -> tuple[str, int, Any] | None:
        """Open a broadcast group of rank 0 and `num_workers` engine workers; None where no transport needs one."""
        if self.transport != "nccl" or self.config.learner.lora is not None:
            return None
        address, port = self._get([self.ranks[0].endpoint.remote()], "syncing")[0]
        return address, port, self.ranks[0].join_broadcast.remote(address, port, 1 + num_workers)

    def train_step(
        self, batches: Sequence[StepBatch], learning_rate: float, *, diagnose: bool = False, stage: Stage = "run"
    ) -> StepResult:
        """One training step on the mini-batches, each sharded over the ranks."""
        self.devices.need("updating", sync_follows=True)
        shares = [self._shares(batch) for batch in batches]
        calls = [
            rank.train_step.remote([share[index] for share in shares], learning_rate, diagnose, stage)
            for index, rank in enumerate(self.ranks)
        ]
        result: StepResult = self._get(calls, "updating")[0]
        return result

    def gap(self, batch: StepBatch) -> tuple[float, float]:
        self.devices.need("updating")
        calls = [rank.gap.remote(share) for rank, share in zip(self.ranks, self._shares(batch), strict=True)]
        gaps: tuple[float, float] = self._get(calls, "updating")[0]
        return gaps

    def _shares(self, batch: StepBatch) -> list[StepBatch]:
        """One share per rank; ranks that are parallel over sequences, N consecutive ones, have the same."""
        copies = self.config.learner.sequence_parallel
        return [share for share in shard(batch, self.config.data_ranks) for _ in range(copies)]

    def _all(self, method: str, *arguments: Any, phase: Phase = "updating") -> list[Any]:
        """Results of one method of every rank."""
        return self._get([getattr(rank, method).remote(*arguments) for rank in self.ranks], phase)

    def _get(self, calls: list[Any], phase: Phase) -> list[Any]:
        """Results of all ranks. Gives up when one rank dies or stalls, because its peers would wait for ever."""
        pending = list(calls)
        try:
            while pending:
                ready = self._wait_for_one(pending, phase)
                pending = [call for call in pending if call not in ready]
                result_of(ready)
            return list(result_of(calls))
        except (*ACTOR_LOST, Stalled) as error:
            if isinstance(error, Stalled):
                hung = [rank for rank, call in enumerate(calls) if call in pending]
                processes = dict(enumerate(self.processes))
                end_stalled({f"learner rank {rank}": (self.ranks[rank], processes.get(rank)) for rank in hung})
            raise LearnerDied(str(error).strip().splitlines()[0]) from error
