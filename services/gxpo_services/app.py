"""The REST application: routers, errors, limits. `create_app` builds one; nothing happens at import."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from fastapi import FastAPI

from gxpo_services import logging
from gxpo_services.api import errors
from gxpo_services.api.connections import most_connections
from gxpo_services.api.dependencies import Slots
from gxpo_services.api.feed import ChangeFeed
from gxpo_services.api.middleware import TAGS, HttpMetrics, RequestMiddleware, describe, operation_id
from gxpo_services.api.principals import TokenUses
from gxpo_services.auth.tokens import router as tokens
from gxpo_services.compare.endpoints import router as comparisons
from gxpo_services.compare.headline import router as headlines
from gxpo_services.db.database import Database
from gxpo_services.db.migrate import upgrade
from gxpo_services.health import router as health
from gxpo_services.ingest.reports import Heartbeats, router as ingest
from gxpo_services.outputs import files
from gxpo_services.outputs.checkpoints import router as checkpoints
from gxpo_services.outputs.events import audit_router as audit, router as events
from gxpo_services.outputs.logs import router as run_logs
from gxpo_services.outputs.metric_series import router as metrics
from gxpo_services.outputs.samples import router as samples
from gxpo_services.outputs.timeline import router as timeline
from gxpo_services.runs import changes as run_changes
from gxpo_services.runs.configs import router as configs
from gxpo_services.runs.endpoints import router as runs
from gxpo_services.settings import ServiceSettings
from gxpo_services.sweeps.groups import router as groups
from gxpo_services.sweeps.studies import router as studies

PREFIX = "/api/v1"


def create_app(settings: ServiceSettings | None = None) -> FastAPI:
    """Create an application with its own database connections.

    SQLite is migrated at start-up. PostgreSQL is migrated by a one-shot job (`gxpo migrate`) before any replica starts.
    """
    if settings is None:
        settings = ServiceSettings()
        os.environ.update(settings.allowlists)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        settings: ServiceSettings = app.state.settings
        database: Database = app.state.database
        if database.is_sqlite:
            upgrade(settings.url)
        settings.artifacts.mkdir(parents=True, exist_ok=True)
        files.remove_deleted(settings.artifacts, database)  # what a crash has left
        # What happens at the same time, at most; the rest waits without occupying a thread. If all 40 threads of the
        # pool waited for a lock, its holder would get none to finish in. SQLite has one writer.
        app.state.session_gate = anyio.Semaphore(1 if database.is_sqlite else 24)
        # Two share commits of PostgreSQL; more only take the GIL from each other, and from all else.
        app.state.report_gate = app.state.session_gate if database.is_sqlite else anyio.Semaphore(2)
        app.state.heartbeats = Heartbeats(database)
        app.state.read_gate = anyio.Semaphore(2)  # they share the GIL: short queries wait for long ones
        app.state.probe_gate = anyio.Semaphore(2)  # without a token: not for many threads of a locked database
        app.state.heavy_gate = anyio.Semaphore(1)
        # Open responses of all tokens, and of one.
        app.state.stream_slots = Slots("streams", most_connections() // 2, 20)
        app.state.heavy_slots = Slots("comparisons and heat maps", 32, 4)  # computed, or waiting for their turn
        app.state.export_slots = Slots("exports", 8, 2)  # each occupies a thread of the pool
        app.state.download_slots = Slots("downloads", 8, 2)  # each has all its files open
        app.state.changes = ChangeFeed(database, run_changes.messages)
        uses = app.state.token_uses = TokenUses()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(uses.keep_writing, database)
            tasks.start_soon(app.state.changes.run)
            yield
            tasks.cancel_scope.cancel()
        uses.write(database)
        database.close()

    app = FastAPI(
        title="gxpo",
        summary="Post-train language models on verifiable problems with GRPO, SFPO and GXPO.",
        version="1",
        lifespan=lifespan,
        docs_url=f"{PREFIX}/docs",
        redoc_url=None,
        openapi_url="/openapi.json",
        generate_unique_id_function=operation_id,
        openapi_tags=TAGS,
    )
    app.state.settings = settings
    app.state.database = Database(settings.url, settings.database_timeout_s)
    logging.configure(as_json=settings.log_json)
    errors.install(app)
    app.state.http_metrics = HttpMetrics()
    app.add_middleware(RequestMiddleware, settings=settings, metrics=app.state.http_metrics)
    for router in (
        *(runs, run_changes.router, configs, groups, studies, ingest, metrics, samples, events, audit),
        *(run_logs, timeline, checkpoints, comparisons, headlines, tokens),
    ):
        app.include_router(router, prefix=PREFIX)
    app.include_router(health)
    describe(app)
    return app
