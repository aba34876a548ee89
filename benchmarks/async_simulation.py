"""Utilization of engines and learner by depth, from measured lengths and times. Pure: no Ray, no clock.

The same rules as rollout/sources.py. An engine with r running sequences takes `base_s` + r · `sequence_s` for
the next token of each; verification overlaps with sampling but for the last group of a batch. Prompts and a step's
update are given for one engine: with more engines the batch grows, and the learner's speed with it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one engine and its learner. lengths: of responses, in tokens. verify_s: of single verdicts."""

    base_s: float
    sequence_s: float
    update_s: float
    sync_s: float
    lengths: Sequence[int]
    verify_s: Sequence[float]
    prompts: int
    samples: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Utilization:
    """step_s: mean over the counted steps. engines, learner: share of the time in which they have work."""

    step_s: float
    engines: float
    learner: float
    staleness: float


@dataclass(slots=True)
class _Engine:
    """running: (number of tokens per sequence at which one ends, group). tokens: of each sequence since the start."""

    running: list[tuple[float, int]] = field(default_factory=list)
    tokens: float = 0.0
    at: float = 0.0
    busy_s: float = 0.0
    stamp: int = 0
    """Number of its latest event."""


class Simulation:
    """One run. Order: `run` once."""

    def __init__(self, measured: Measured, engines: int, depth: int, *, in_flight: bool = False, seed: int = 0) -> None:
        self._m, self._depth, self._in_flight = measured, depth, in_flight
        self._draw = np.random.default_rng(seed)
        self._engines = [_Engine() for _ in range(engines)]
        self._events: list[tuple[float, int, int]] = []
        self._loads = [(0, index) for index in range(engines)]
        self._waiting: deque[int] = deque()
        self._unfinished: dict[int, int] = {}
        self._step_of: list[int] = []
        self._left: dict[int, int] = {}
        self._version_of: dict[int, int] = {}
        self._planned = self._version = self._engine_version = 0
        self._open = 0
        self._now = 0.0

    def run(self, steps: int, *, skip: int = 3) -> Utilization:
        """Train `steps` steps; the first `skip` are not counted."""
        learner_s, begin, busy, behind = 0.0, 0.0, 0.0, []
        self._sync()
        for step in range(1, steps + 1):
            while self._left[step]:
                self._advance(np.inf)
            self._advance_to(self._now + float(self._draw.choice(self._m.verify_s)))
            if self._engine_version < self._version and not self._open:
                learner_s += self._sync()
            behind.append(step - 1 - self._version_of[step])
            self._advance_to(self._now + self._m.update_s)
            learner_s += self._m.update_s
            self._version = step
            if self._in_flight or not self._open:
                learner_s += self._sync()
            if step == skip:
                begin, busy, learner_s, behind = self._now, self._busy(), 0.0, []
        elapsed = self._now - begin
        engines = (self._busy() - busy) / (elapsed * len(self._engines))
        return Utilization(elapsed / (steps - skip), engines, learner_s / elapsed, float(np.mean(behind)))

    def _sync(self) -> float:
        """Load the learner's version, during which no engine samples, and plan the batches that it allows."""
        for index in range(len(self._engines)):
            self._settle(index)
        self._now += self._m.sync_s
        for index, engine in enumerate(self._engines):
            engine.at = self._now
            self._schedule(index)
        self._engine_version = self._version
        size = self._m.prompts * len(self._engines)
        for step in range(self._planned + 1, self._version + 2 + self._depth):
            first = len(self._step_of)
            self._step_of += [step] * size
            self._waiting.extend(range(first, first + size))
            self._left[step], self._version_of[step], self._planned = size, self._version, step
        self._assign()
        return self._m.sync_s

    def _assign(self) -> None:
        """Groups go to the engine with the fewest sequences that has room, as in rollout/engines.py."""
        while self._waiting and self._loads:
            load, index = self._loads[0]
            engine = self._engines[index]
            if load != len(engine.running) or load >= self._m.max_num_seqs:
                heapq.heappop(self._loads)  # stale, or without room until a response ends
                continue
            self._settle(index)
            group = self._waiting.popleft()
            for length in self._draw.choice(self._m.lengths, size=self._m.samples):
                heapq.heappush(engine.running, (engine.tokens + float(length), group))
            self._unfinished[group] = self._m.samples
            self._open += 1
            heapq.heapreplace(self._loads, (len(engine.running), index))
            self._schedule(index)

    def _token_s(self, engine: _Engine) -> float:
        return self._m.base_s + self._m.sequence_s * len(engine.running)

    def _settle(self, index: int) -> None:
        """Account for what the engine has done until now."""
        engine = self._engines[index]
        if engine.running and self._now > engine.at:
            engine.busy_s += self._now - engine.at
            engine.tokens += (self._now - engine.at) / self._token_s(engine)
        engine.at = max(engine.at, self._now)

    def _schedule(self, index: int) -> None:
        """The engine's next end of a response, in place of the one that was expected before."""
        engine = self._engines[index]
        engine.stamp += 1
        if engine.running:
            end = engine.at + max(0.0, engine.running[0][0] - engine.tokens) * self._token_s(engine)
            heapq.heappush(self._events, (end, index, engine.stamp))

    def _advance_to(self, moment: float) -> None:
        while self._now < moment:
            self._advance(moment)

    def _advance(self, moment: float) -> None:
        """Go to the next end of a response, or to `moment`."""
        while self._events and self._events[0][2] != self._engines[self._events[0][1]].stamp:
            heapq.heappop(self._events)
        if not self._events or self._events[0][0] > moment:
            assert moment < np.inf, "the learner waits for a batch that nobody samples"
            self._now = moment
            return
        self._now, index, _ = heapq.heappop(self._events)
        self._settle(index)
        engine = self._engines[index]
        while engine.running and engine.running[0][0] <= engine.tokens + 1e-6:
            self._finish(heapq.heappop(engine.running)[1])
        heapq.heappush(self._loads, (len(engine.running), index))
        self._schedule(index)
        self._assign()

    def _finish(self, group: int) -> None:
        """One response of a group has ended."""
        self._unfinished[group] -= 1
        if not self._unfinished[group]:
            del self._unfinished[group]
            self._left[self._step_of[group]] -= 1
            self._open -= 1

    def _busy(self) -> float:
        for index in range(len(self._engines)):
            self._settle(index)
        return sum(engine.busy_s for engine in self._engines)
