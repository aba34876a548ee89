"""The REST application: routers, errors, limits. `create_app` builds one; nothing happens at import."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from fastapi import FastAPI

from gxpo_services import errors, health, logs
from gxpo_services.comparisons.endpoints import router as comparisons
from gxpo_services.comparisons.memory import Memory
from gxpo_services.db import Database
from gxpo_services.deps import MAX_SESSIONS, READS_AT_ONCE
from gxpo_services.groups.endpoints import router as groups
from gxpo_services.metrics.endpoints import router as metrics
from gxpo_services.middleware import install as install_middleware
from gxpo_services.migrate import upgrade
from gxpo_services.openapi import describe
from gxpo_services.runs import artifacts
from gxpo_services.runs.endpoints import router as runs
from gxpo_services.samples.endpoints import router as samples
from gxpo_services.settings import ServiceSettings
from gxpo_services.tokens.endpoints import router as tokens

PREFIX = "/api/v1"


def create_app(settings: ServiceSettings | None = None) -> FastAPI:
    """An application of its own, with its own database connections.

    At start-up the database is brought to the newest schema, except on PostgreSQL, where a one-shot job does that
    before any replica starts (`gxpo migrate`).
    """
    settings = settings or ServiceSettings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        settings: ServiceSettings = app.state.settings
        database: Database = app.state.database
        if database.is_sqlite:
            upgrade(settings.url)
        settings.artifacts.mkdir(parents=True, exist_ok=True)
        artifacts.empty_trash(settings.artifacts)  # what a crash left of a deletion
        app.state.session_gate = anyio.Semaphore(MAX_SESSIONS)
        app.state.comparisons = Memory()
        app.state.read_gate = anyio.Semaphore(READS_AT_ONCE)
        yield
        database.close()

    app = FastAPI(
        title="gxpo",
        summary="Post-train language models on verifiable problems with GRPO, SFPO and GXPO.",
        version="1",
        lifespan=lifespan,
        docs_url=f"{PREFIX}/docs",
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.state.settings = settings
    app.state.database = Database(settings.url)
    logs.configure(as_json=settings.log_json)
    errors.install(app)
    install_middleware(app, settings)
    for router in (runs, groups, metrics, samples, comparisons, tokens):
        app.include_router(router, prefix=PREFIX)
    app.include_router(health.router)
    describe(app)
    return app
