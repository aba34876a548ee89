"""FastAPI dependencies: settings, database sessions, principals, and limits of what happens at the same time.

A writing session is committed when the endpoint returns, before the response is sent, and rolled back when it raises.
Dependencies that never block are `async`: FastAPI runs all others in a thread, which costs more than their work.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.dependencies.utils import get_flat_params
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy import select
from sqlalchemy.orm import Session

from gxpo_services.api.errors import Forbidden, Invalid, LimitReached, NotFound, Unauthorized, responses
from gxpo_services.api.fields import RunId, read_json
from gxpo_services.api.principals import Principal, Role, TokenUses, find_by_secret
from gxpo_services.db.database import Database
from gxpo_services.db.tables import Group, Run
from gxpo_services.settings import ServiceSettings

Found = TypeVar("Found", Run, Group)


class Slots:
    """Limit of the open responses of one kind that take long: streams, exports, comparisons.

    Used by the event loop's thread only. total: of all tokens together. each: of one token, so that one reader cannot
    take those of all.
    """

    def __init__(self, what: str, total: int, each: int) -> None:
        self._what, self._total, self._each = what, total, each
        self._open: Counter[str] = Counter()

    @contextmanager
    def holding(self, owner: str) -> Iterator[None]:
        """Count a response within the context. Raises LimitReached."""
        if self._open[owner] >= self._each:
            has = f"your token has {self._each} open {self._what}"
            raise LimitReached(f"{has}, which is the limit; close one or wait for its end")
        if self._open.total() >= self._total:
            raise LimitReached(f"the service has {self._total} open {self._what}, which is the limit; try again later")
        self._open[owner] += 1
        try:
            yield
        finally:
            self._open[owner] -= 1
            self._open += Counter()  # forget those without any


async def get_settings(request: Request) -> ServiceSettings:
    settings: ServiceSettings = request.app.state.settings
    return settings


async def get_database(request: Request) -> Database:
    database: Database = request.app.state.database
    return database


Settings = Annotated[ServiceSettings, Depends(get_settings)]
DatabaseDep = Annotated[Database, Depends(get_database)]

_bearer = HTTPBearer(auto_error=False, description="A token made by `gxpo token create`.")


async def bearer(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> str:
    """The bearer token of a request. Raises Unauthorized."""
    if credentials is None:
        raise Unauthorized("missing bearer token; send Authorization: Bearer <token>, made with `gxpo token create`")
    return credentials.credentials


BearerToken = Annotated[str, Depends(bearer)]


def any_principal(request: Request, token: BearerToken, database: DatabaseDep) -> Principal:
    """The principal of any valid token, that of a Prometheus too. Notes the use. Raises Unauthorized."""
    with database.autocommit_connection() as connection:
        principal = find_by_secret(connection, token)
    if principal is None:
        raise Unauthorized("the token is unknown, revoked or expired; sign in with another")
    uses: TokenUses = request.app.state.token_uses
    uses.note(principal.token_id)
    return principal


Scraper = Annotated[Principal, Depends(any_principal)]


async def _viewer(request: Request, principal: Scraper) -> Principal:
    if principal.role < Role.VIEWER:
        raise Forbidden(f"your token {principal.name!r} has role {principal.role.word}, which reads only /metrics")
    # A misspelt filter would select everything.
    for name in sorted(request.query_params.keys() - request.scope["route"].parameters):
        raise Invalid.of(name, "is not a parameter of this request; correct its name")
    return principal


Viewer = Annotated[Principal, Depends(_viewer)]


def _at_least(role: Role) -> object:
    async def check(principal: Viewer) -> Principal:
        if principal.role < role:
            raise Forbidden(f"role {role.word} is needed; your token {principal.name!r} has role {principal.role.word}")
        return principal

    return Depends(check)


Submitter = Annotated[Principal, _at_least(Role.SUBMITTER)]
Admin = Annotated[Principal, _at_least(Role.ADMIN)]


class _StrictRequest(Request):
    """A request whose body is read as JSON from an untrusted source."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return read_json(body)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None  # what FastAPI turns into an error of the body


class ServiceRoute(APIRoute):
    """A route that authenticates before it reads the body, which FastAPI does before any dependency.

    parameters: their names.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        self.parameters = frozenset(field.alias for field in get_flat_params(self.dependant))
        if self.body_field is None:
            return handle

        async def authenticated(request: Request) -> Response:
            token = await bearer(await _bearer(request))
            principal = await run_in_threadpool(any_principal, request, token, request.app.state.database)
            await _viewer(request, principal)
            return await handle(_StrictRequest(request.scope, request.receive))

        return authenticated


def run_router() -> APIRouter:
    """A router of what a run has left."""
    described = responses(401, 404, 422, 503)
    return APIRouter(route_class=ServiceRoute, prefix="/runs/{run_id}", tags=["samples"], responses=described)


def _turn(gate: str) -> Any:
    """Dependency that holds a semaphore of the application's state until the endpoint has returned."""

    async def wait(request: Request) -> AsyncIterator[None]:
        async with getattr(request.app.state, gate):
            yield

    return Depends(wait, scope="function")


ProbeTurn = Annotated[None, _turn("probe_gate")]
_WriteTurn = Annotated[None, _turn("session_gate")]
_ReadTurn = Annotated[None, _turn("read_gate")]


def _writing(database: DatabaseDep, _: _WriteTurn) -> Iterator[Session]:
    with database.writing() as session:
        yield session


async def _reading(database: DatabaseDep, _: _ReadTurn) -> AsyncIterator[Session]:
    """Neither begin nor end of a reading session blocks (db/database.py); its queries run in the endpoint's thread."""
    with database.reading() as session:
        yield session


# scope="function": the transaction is committed before the response is sent.
WriteSession = Annotated[Session, Depends(_writing, scope="function")]
ReadSession = Annotated[Session, Depends(_reading, scope="function")]


def held_slot(kind: str) -> Any:
    """Dependency that holds a slot until the last byte is sent or the client is gone. Raises LimitReached.

    What the endpoint puts on its stack is closed then: a response that is cancelled leaves its iterator to the garbage
    collector.
    """

    async def hold(request: Request, principal: Viewer) -> AsyncIterator[ExitStack]:
        slots: Slots = getattr(request.app.state, kind)
        with slots.holding(principal.token_id), ExitStack() as held:
            yield held

    return Depends(hold)


async def _heavy(request: Request, principal: Viewer) -> AsyncIterator[None]:
    slots: Slots = request.app.state.heavy_slots
    with slots.holding(principal.token_id):
        async with request.app.state.heavy_gate:
            yield


Heavy = Depends(_heavy, scope="function")
"""Dependency of a route whose response takes long to compute; it waits for its turn before it holds a session."""


def find(session: Session, table: type[Found], public_id: str, *, lock: bool = False) -> Found:
    """A run or group by its public id. lock: SELECT … FOR UPDATE. Raises NotFound."""
    query = select(table).where(table.id == public_id)
    if lock:
        query = query.with_for_update(of=table).execution_options(populate_existing=True)
    row = session.scalar(query)
    if row is None:
        raise NotFound(f"there is no {table.__name__.lower()} {public_id}")
    return row


def run_number(session: Session, run_id: str) -> int:
    """Row number of a run. Raises NotFound."""
    number = session.scalar(select(Run.number).where(Run.id == run_id))
    if number is None:
        raise NotFound(f"there is no run {run_id}")
    return number


def run_numbers(database: Database, run_ids: Sequence[str]) -> list[int]:
    """Row numbers of runs, in a session of its own. Raises NotFound."""
    with database.reading() as session:
        numbers: dict[str, int] = dict(session.execute(select(Run.id, Run.number).where(Run.id.in_(run_ids))).all())
    for run_id in run_ids:
        if run_id not in numbers:
            raise NotFound(f"there is no run {run_id}")
    return list(numbers.values())


def _existing(run_id: RunId, _: Viewer, database: DatabaseDep) -> str:
    """Id of an existing run; the transaction ends before any file is read or sent."""
    run_numbers(database, [run_id])
    return run_id


ExistingRun = Annotated[str, Depends(_existing)]
