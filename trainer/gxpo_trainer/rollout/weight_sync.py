"""Sync of engines to a version of the learner's weights, which the engines load while the next bucket is packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import ray

from gxpo_trainer.errors import LearnerDied, Stalled, WeightsUnavailable
from gxpo_trainer.rollout.engines import Engine, Engines
from gxpo_trainer.weights.buckets import SyncReport, WeightBucket


class WeightSource(Protocol):
    """Publishes the learner's weights bucket by bucket; `LearnerGroup` is one."""

    @property
    def sender(self) -> Any:
        """The rank that sends broadcasts; another object after a restart."""

    def next_bucket(self, version: int, index: int, nodes: Sequence[str]) -> tuple[WeightBucket, float | None]:
        """Pack bucket `index` for engines on these Ray nodes. After the last one also the fraction of weights that
        changed since the version before. Index 0 starts a version, also when the one before was not finished."""

    def send(self, bucket: WeightBucket) -> Any:
        """Start to send a bucket that the engines receive by a collective; None for other transports."""

    def open_broadcast(self, num_workers: int) -> tuple[str, int, Any] | None:
        """Address, port and pending call of a new broadcast group; None for transports without one."""


class WeightSync:
    """Loads versions into engines. A death does not stop the others, except in a broadcast, which fails for all: the
    version is then sent again to the engines that are left, in a new group."""

    def __init__(self, engines: Engines, tensor_parallel: int) -> None:
        self._engines, self._tensor_parallel = engines, tensor_parallel
        self._members: list[Any] = []
        """The broadcast group's sender and engine actors; empty without a group."""

    def run(self, source: WeightSource, version: int, engines: Sequence[Engine]) -> SyncReport | None:
        """Bring these engines to `version` and verify them; the slowest one's report, None when all of them died.

        Raises WeightSyncMismatch, and LearnerDied when the published weights are unavailable.
        """
        for engine in engines:
            engine.version = None
        pending = list(engines)
        while pending:
            try:
                synced = self._send(source, version, pending)
            except WeightsUnavailable as error:
                self._members = []
                survivors = [engine for engine in pending if engine.ready]
                if len(survivors) == len(pending):
                    raise LearnerDied(f"its published weights are unavailable ({error})") from error
                pending = survivors
                continue
            for engine in pending:
                if engine.ready:
                    engine.version = version
            return synced
        return None

    def _send(self, source: WeightSource, version: int, engines: Sequence[Engine]) -> SyncReport | None:
        """Send all buckets. Raises WeightsUnavailable when a broadcast has lost a member."""
        nodes = [engine.node for engine in engines]
        self._join_broadcast(source, engines)
        loading: list[tuple[Engine, Any]] = []
        sending, index = None, 0
        while True:
            bucket, changed = source.next_bucket(version, index, nodes)
            self._finish(loading, sending)
            self._check_members(engines)
            loading = [(e, e.between_steps(e.actor.receive, bucket)) for e in engines if e.ready]
            if not loading:
                return None
            sending = source.send(bucket)
            if bucket.last:
                break
            index += 1
        reports = self._finish(loading, sending)
        if not reports:
            return None
        slowest: SyncReport = max(reports, key=lambda report: report.load_s + report.verify_s)
        return replace(slowest, changed_fraction=changed)

    def _finish(self, calls: list[tuple[Engine, Any]], sending: Any) -> list[Any]:
        """Results of the engines that are left, once the source has sent its bucket. Raises WeightsUnavailable."""
        results = self._engines.results(calls)
        if sending is not None:
            try:
                self._engines.placement.group.get(sending, "syncing")
            except (ray.exceptions.RayActorError, Stalled) as error:
                raise LearnerDied(str(error).strip().splitlines()[0]) from error
        return results

    def _check_members(self, engines: Sequence[Engine]) -> None:
        """Raise WeightsUnavailable before a broadcast that a dead member would block."""
        if self._members and not all(engine.ready for engine in engines):
            raise WeightsUnavailable("an engine of the weight broadcast group died")

    def _join_broadcast(self, source: WeightSource, engines: Sequence[Engine]) -> None:
        """Form a new broadcast group whenever its members change. Raises WeightsUnavailable when one died."""
        members = [source.sender, *(engine.actor for engine in engines)]
        if members == self._members:
            return
        size = self._tensor_parallel
        workers = len(engines) * size
        opened = source.open_broadcast(workers)
        if opened is None:
            return
        address, port, pending = opened
        self._members = members
        calls = [
            (engine, engine.between_steps(engine.actor.join_broadcast, address, port, 1 + place * size, 1 + workers))
            for place, engine in enumerate(engines)
        ]
        self._finish(calls, pending)
        self._check_members(engines)
