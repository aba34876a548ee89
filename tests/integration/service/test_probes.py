"""Probes need no token: whatever the database does, they must not take threads from authenticated requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import httpx
from fastapi import FastAPI
from sqlalchemy import text

from gxpo_services.db.database import Database

PROBES = 60
"""More than the 40 threads of the pool."""
LONGEST_S = 20.0
"""Less than the 30 s after which SQLite gives up waiting for a lock."""


@contextmanager
def locked(database: Database) -> Iterator[None]:
    """SQLite's write lock, or the lock of a migration on PostgreSQL's table of revisions."""
    with database.engine.begin() as connection:
        if not database.is_sqlite:
            connection.execute(text("LOCK TABLE alembic_version IN ACCESS EXCLUSIVE MODE"))
        yield


def test_probes_on_a_locked_database_delay_nobody(
    app: FastAPI, database: Database, token_for: Callable[[str], str]
) -> None:
    viewer = {"Authorization": f"Bearer {token_for('viewer')}"}
    others: list[tuple[str, int]] = []
    probes: list[tuple[str, int]] = []

    async def get(http: httpx.AsyncClient, path: str, answers: list[tuple[str, int]]) -> None:
        answers.append((path, (await http.get(path, headers=viewer)).status_code))

    async def ask() -> None:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as http,
            anyio.create_task_group() as tasks,
        ):
            with locked(database):
                for _ in range(PROBES):
                    tasks.start_soon(get, http, "/health/ready", probes)
                await anyio.sleep(0.5)
                with anyio.move_on_after(LONGEST_S):
                    for path in ("/health/live", "/api/v1/tokens/me", "/api/v1/runs"):
                        await get(http, path, others)
                    while database.is_sqlite and len(probes) < PROBES:
                        await anyio.sleep(0.01)
                answered_while_locked = len(probes)
        assert answered_while_locked == (PROBES if database.is_sqlite else 0)

    anyio.run(ask)
    assert others == [("/health/live", 200), ("/api/v1/tokens/me", 200), ("/api/v1/runs", 200)]
    assert probes == [("/health/ready", 200)] * PROBES


def test_liveness_needs_no_thread(app: FastAPI) -> None:
    async def ask() -> int:
        limiter = anyio.to_thread.current_default_thread_limiter()
        for number in range(int(limiter.total_tokens)):
            limiter.acquire_on_behalf_of_nowait(number)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            with anyio.fail_after(LONGEST_S):
                return (await http.get("/health/live")).status_code

    assert anyio.run(ask) == 200
