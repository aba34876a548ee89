"""What endpoints ask for: settings, a session in the request's transaction, and who is asking.

A session is committed when the endpoint returns, before the answer is sent, and rolled back when it raises. What does
not wait for anything is `async`: FastAPI gives everything else a thread of its own, which costs more than the work.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, get_type_hints

import anyio
from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.orm import Session

from gxpo_services.auth import Principal, Role
from gxpo_services.db import Database
from gxpo_services.errors import Forbidden, Unauthorized
from gxpo_services.settings import ServiceSettings
from gxpo_services.tokens import repository as tokens

_bearer = HTTPBearer(auto_error=False, description="A token made by `gxpo token create`.")
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


async def get_settings(request: Request) -> ServiceSettings:
    settings: ServiceSettings = request.app.state.settings
    return settings


async def get_database(request: Request) -> Database:
    database: Database = request.app.state.database
    return database


Settings = Annotated[ServiceSettings, Depends(get_settings)]
DatabaseDep = Annotated[Database, Depends(get_database)]


MAX_SESSIONS = 24
"""Requests that hold or wait for a session at the same time; the others wait without a thread of the pool of 40.

If all threads waited for a lock, its holder would find none to finish in, and so would they.
"""


def _gate(name: str) -> Any:
    """A dependency that waits for the semaphore of this name in the application's state."""

    async def wait(request: Request) -> AsyncIterator[None]:
        gate: anyio.Semaphore | None = getattr(request.app.state, name, None)
        if gate is None:  # an application of one router, without this one's start-up
            yield
            return
        async with gate:
            yield

    return Depends(wait, scope="function")


Gate = Annotated[None, _gate("session_gate")]


def _writing(database: DatabaseDep, _: Gate) -> Iterator[Session]:
    with database.writing() as session:
        yield session


READS_AT_ONCE = 3
"""Reading requests that hold a session. They share one interpreter: more of them only take it from each other, which
costs a quarter of the work and makes each wait for all."""


ReadGate = Annotated[None, _gate("read_gate")]


async def _reading(database: DatabaseDep, _: ReadGate) -> AsyncIterator[Session]:
    """A session that has asked nothing yet; ServiceRoute ends it where it was used."""
    session = database.read_session()
    try:
        yield session
    finally:
        if session.in_transaction():  # used by something else than an endpoint of ServiceRoute
            await run_in_threadpool(session.close)


class ServiceRoute(APIRoute):
    """A route whose endpoint ends its reading session itself, in its own thread: a way into another thread and back
    takes longer than most questions to the database."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        names = [name for name, kind in get_type_hints(endpoint, include_extras=True).items() if kind == ReadSession]
        super().__init__(path, _ending(endpoint, names[0]) if names else endpoint, **options)


def _ending(endpoint: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(endpoint)
    def call(**values: Any) -> Any:
        try:
            return endpoint(**values)
        finally:
            values[name].close()

    return call


# scope="function": the transaction ends before the answer leaves, so a client that was told "done" finds it done.
WriteSession = Annotated[Session, Depends(_writing, scope="function")]
ReadSession = Annotated[Session, Depends(_reading, scope="function")]


async def bearer(credentials: Credentials) -> str:
    """The token of a request. Raises Unauthorized when there is none."""
    if credentials is None:
        raise Unauthorized("a bearer token is needed: Authorization: Bearer <token>; `gxpo token create` makes one")
    return credentials.credentials


BearerToken = Annotated[str, Depends(bearer)]


def _principal(token: BearerToken, database: DatabaseDep) -> Principal:
    with database.looking() as connection:
        found = tokens.find_by_secret(connection, token)
    if found is None:
        raise Unauthorized("the token is unknown, revoked or expired; sign in with another")
    return found


Viewer = Annotated[Principal, Depends(_principal)]


def _at_least(role: Role) -> object:
    async def check(principal: Viewer) -> Principal:
        if principal.role < role:
            raise Forbidden(f"this needs the role {role.word}; your token {principal.name!r} is {principal.role.word}")
        return principal

    return Depends(check)


Submitter = Annotated[Principal, _at_least(Role.SUBMITTER)]
Admin = Annotated[Principal, _at_least(Role.ADMIN)]
