"""Comparisons and heat maps, computed in another process.

In the service's own they held up every short answer, because its threads share one interpreter lock: while two viewers
compared, a page of runs took nine times as long on SQLite and three times as long on PostgreSQL. The process starts
with the first comparison (1.4 s, 150 MB), is used again for the next ones, and ends with the service.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar, TypeVarTuple

from anyio import BrokenWorkerProcess, to_process

from gxpo_services.api.errors import Unavailable
from gxpo_services.compare import service
from gxpo_services.compare.cache import ComparisonCache
from gxpo_services.compare.schemas import CompareQuery, HeatMapQuery, HeatMapView
from gxpo_services.db.database import Database

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

_CACHE = ComparisonCache()


async def in_worker(function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """The function's result or exception from the other process. Raises Unavailable when that is killed meanwhile."""
    try:
        return await to_process.run_sync(function, *arguments, cancellable=True)
    except BrokenWorkerProcess as error:
        raise Unavailable("the process that compares runs was killed, perhaps for its memory; retry") from error


def compare(database_url: str, query: CompareQuery) -> bytes:
    """See `service.compare_as_json`."""
    with _database(database_url).reading() as session:
        return service.compare_as_json(session, query, _CACHE)


def heat_map(database_url: str, group_id: str, query: HeatMapQuery) -> HeatMapView:
    """See `service.group_heat_map`."""
    with _database(database_url).reading() as session:
        return service.group_heat_map(session, group_id, query)


@cache
def _database(url: str) -> Database:
    return Database(url)
