"""Which engine samples which request. Pure: no Ray, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Load:
    """Unfinished requests of one engine: their indices, tokens and sequences."""

    open: set[int] = field(default_factory=set)
    tokens: int = 0
    sequences: int = 0


class Dispatcher:
    """Assigns requests to engines; every request is open in exactly one engine, waiting, or finished.

    All samples of a request go to one engine, because they share its prefix. The next request goes to the engine with
    the fewest unfinished tokens among those with room for it, so a slow engine gets less. An engine holds at most
    `max_sequences`, and one request beyond, so that it never runs out while more are on their way.

    tokens, sequences: of each request, tokens being the most that it can take.
    """

    def __init__(self, tokens: Sequence[int], sequences: Sequence[int], max_sequences: int) -> None:
        self._tokens: list[int] = []
        self._sequences: list[int] = []
        self._max_sequences = max_sequences
        self._waiting: deque[int] = deque()
        self._loads: dict[int, _Load] = {}
        self._finished: set[int] = set()
        self.add(tokens, sequences)

    def add(self, tokens: Sequence[int], sequences: Sequence[int], *, first: bool = False) -> list[int]:
        """Add requests; their indices. first: before those that wait."""
        added = list(range(len(self._tokens), len(self._tokens) + len(tokens)))
        self._tokens += tokens
        self._sequences += sequences
        if first:
            self._waiting.extendleft(reversed(added))
        else:
            self._waiting.extend(added)
        return added

    @property
    def done(self) -> bool:
        """Whether every request that was added is finished."""
        return len(self._finished) == len(self._tokens)

    def finished(self, indices: Iterable[int]) -> bool:
        """Whether these requests are finished."""
        return self._finished.issuperset(indices)

    def open_requests(self, engine: int) -> int:
        """Number of unfinished requests of an engine."""
        return len(self._loads[engine].open) if engine in self._loads else 0

    def add_engine(self, engine: int) -> None:
        self._loads[engine] = _Load()

    def remove_engine(self, engine: int) -> None:
        """The engine is lost: its unfinished requests are assigned again, before the others."""
        lost = self._loads.pop(engine, _Load()).open
        self._waiting.extendleft(sorted(lost, reverse=True))

    def assign(self) -> dict[int, list[int]]:
        """Indices of the requests to submit now, by engine."""
        assigned: dict[int, list[int]] = {}
        while self._waiting:
            free = [engine for engine, load in self._loads.items() if load.sequences < self._max_sequences]
            if not free:
                break
            engine = min(free, key=lambda candidate: (self._loads[candidate].tokens, candidate))
            index = self._waiting.popleft()
            load = self._loads[engine]
            load.open.add(index)
            load.tokens += self._tokens[index]
            load.sequences += self._sequences[index]
            assigned.setdefault(engine, []).append(index)
        return assigned

    def finish(self, engine: int, index: int) -> bool:
        """Record a result; False when the request is not open in this engine (it was assigned again)."""
        load = self._loads.get(engine)
        if load is None or index not in load.open:
            return False
        load.open.discard(index)
        load.tokens -= self._tokens[index]
        load.sequences -= self._sequences[index]
        self._finished.add(index)
        return True
