"""FastAPI dependencies: settings, database sessions and the authenticated principal.

A session is committed when the endpoint returns, before the response is sent, and rolled back when it raises.
Dependencies that never block are `async`: FastAPI runs all others in a thread, which costs more than their work.

Slots for responses that take long: streams, exports and comparisons. One reader cannot take those of all.

The run named in a path, or 404.

Look-up of a run by its public id.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Annotated, Any, get_type_hints

import anyio
from fastapi import Depends, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy import Connection, select
from sqlalchemy.orm import Session
from starlette.types import Receive, Scope, Send

from gxpo_services.api.errors import Forbidden, LimitReached, NotFound, Unauthorized
from gxpo_services.api.fields import RunId
from gxpo_services.api.principals import Principal, Role, TokenUses, find_by_secret
from gxpo_services.db.database import Database
from gxpo_services.db.tables import Run
from gxpo_services.run_states import RunState
from gxpo_services.settings import ServiceSettings


class Slots:
    """Counts the open responses of one kind, by token. Used by the event loop's thread only.

    total: of all tokens together. each: of one token.
    """

    def __init__(self, what: str, total: int, each: int) -> None:
        self._what, self._total, self._each = what, total, each
        self._open: Counter[str] = Counter()

    @contextmanager
    def holding(self, owner: str) -> Iterator[None]:
        """Count a response within the context. Raises LimitReached."""
        self.take(owner)
        try:
            yield
        finally:
            self.release(owner)

    def take(self, owner: str) -> None:
        """Count a response that is about to open. Raises LimitReached."""
        if self._open[owner] >= self._each:
            has = f"your token has {self._each} open {self._what}"
            raise LimitReached(f"{has}, which is the limit; close one or wait for its end")
        if self._open.total() >= self._total:
            raise LimitReached(f"the service has {self._total} open {self._what}, which is the limit; try again later")
        self._open[owner] += 1

    def release(self, owner: str) -> None:
        self._open[owner] -= 1
        self._open += Counter()  # forget those without any


class SlottedResponse(StreamingResponse):
    """A stream that holds a slot from its first to its last byte, or until its client is gone.

    Without a free slot the response is the problem LimitReached.
    """

    def __init__(self, slots: Slots, owner: str, content: Any, **options: Any) -> None:
        super().__init__(content, **options)
        self._slots, self._owner = slots, owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._slots.holding(self._owner):
            await super().__call__(scope, receive, send)


def slots_of(request: Request, name: str) -> Slots:
    """Slots of the application: `stream_slots`, `export_slots` or `heavy_slots`."""
    found: Slots = getattr(request.app.state, name)
    return found


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
"""Maximum number of requests that hold or wait for a session; further ones wait without occupying a thread.

If all 40 threads of the pool waited for a lock, its holder would get no thread to finish in: a deadlock.
"""


def _gate(request: Request, name: str) -> AbstractAsyncContextManager[Any]:
    """The semaphore of this name in the application's state."""
    gate: anyio.Semaphore | None = getattr(request.app.state, name, None)
    return nullcontext() if gate is None else gate  # None: an application of one router, without this one's start-up


async def _session_gate(request: Request) -> AsyncIterator[None]:
    async with _gate(request, "session_gate"):
        yield


Gate = Annotated[None, Depends(_session_gate, scope="function")]


PROBES_AT_ONCE = 2
"""Maximum number of readiness probes that query the database. They need no token, so that a locked database must not
let them occupy the threads and connections of authenticated requests."""


async def _probe_gate(request: Request) -> AsyncIterator[None]:
    async with _gate(request, "probe_gate"):
        yield


ProbeGate = Annotated[None, Depends(_probe_gate, scope="function")]


def _writing(database: DatabaseDep, _: Gate) -> Iterator[Session]:
    with database.writing() as session:
        yield session


HEAVY_AT_ONCE = 1
"""Maximum number of comparisons and heat maps that are computed at the same time; each would have a process."""
READS_AT_ONCE = 2
"""Maximum number of reading requests that hold a session. They share the GIL: with more of them, short queries wait for
long ones. The second one runs while the first waits for the database."""


async def _reading(request: Request, database: DatabaseDep) -> AsyncIterator[Session]:
    """An unused session; ServiceRoute closes it in the thread that used it."""
    async with _gate(request, "read_gate"):
        session = database.read_session()
        try:
            yield session
        finally:
            if session.in_transaction():  # used outside an endpoint of ServiceRoute
                await run_in_threadpool(session.close)


# scope="function": the transaction is committed before the response is sent.
WriteSession = Annotated[Session, Depends(_writing, scope="function")]
ReadSession = Annotated[Session, Depends(_reading, scope="function")]


async def bearer(request: Request, credentials: Credentials) -> str:
    """The bearer token of a request, noted as used. Raises Unauthorized."""
    if credentials is None:
        raise Unauthorized("missing bearer token; send Authorization: Bearer <token>, made with `gxpo token create`")
    uses: TokenUses | None = getattr(request.app.state, "token_uses", None)
    if uses is not None:  # None: an application of one router
        uses.note(credentials.credentials)
    return credentials.credentials


BearerToken = Annotated[str, Depends(bearer)]


def _principal(token: BearerToken, database: DatabaseDep) -> Principal:
    with database.autocommit_connection() as connection:
        return _known(connection, token)


def _known(database: Session | Connection, token: str, least: Role = Role.VIEWER) -> Principal:
    """The principal of this token. Raises Unauthorized; Forbidden below the role `least`."""
    found = find_by_secret(database, token)
    if found is None:
        raise Unauthorized("the token is unknown, revoked or expired; sign in with another")
    if found.role < least:
        raise Forbidden(f"your token {found.name!r} has role {found.role.word}, which reads /metrics and nothing else")
    return found


def _scraper(token: BearerToken, database: DatabaseDep) -> Principal:
    with database.autocommit_connection() as connection:
        return _known(connection, token, Role.METRICS)


Viewer = Annotated[Principal, Depends(_principal)]
Scraper = Annotated[Principal, Depends(_scraper)]
"""Any valid token, that of a Prometheus too."""


async def _heavy_gate(request: Request, principal: Viewer) -> AsyncIterator[None]:
    with slots_of(request, "heavy_slots").holding(principal.token_id):
        async with _gate(request, "heavy_gate"):
            yield


Heavy = Depends(_heavy_gate, scope="function")
"""Dependency of a route whose response takes long to compute; it waits for its turn before it holds a session."""


class ServiceRoute(APIRoute):
    """A route that authenticates, queries and closes the session of a reading endpoint in a single thread: a switch
    takes longer than most queries."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, _in_one_thread(endpoint), **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def authenticated(request: Request) -> Response:
            """Authenticate before reading a body, and before reporting validation errors."""

            async def authenticate() -> None:
                token = await bearer(request, await _bearer(request))
                await run_in_threadpool(_principal, token, request.app.state.database)

            if self.body_field is not None:
                await authenticate()
            try:
                return await handle(request)
            except RequestValidationError:
                if hasattr(self.endpoint, _DONE):
                    await authenticate()
                raise

        return authenticated


def _in_one_thread(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an endpoint: resolve its Viewer parameters from tokens in its reading session, and close that session."""
    if hasattr(endpoint, _DONE):  # include_router creates each route a second time
        return endpoint
    kinds = get_type_hints(endpoint, include_extras=True)
    sessions = [name for name, kind in kinds.items() if kind == ReadSession]
    viewers = [name for name, kind in kinds.items() if kind == Viewer]
    if not sessions:
        return endpoint

    @functools.wraps(endpoint)
    def call(**values: Any) -> Any:
        session: Session = values[sessions[0]]
        try:
            for name in viewers:
                values[name] = _known(session, values[name])
            return endpoint(**values)
        finally:
            session.close()

    asked = kinds | dict.fromkeys(viewers, BearerToken)
    signature = inspect.signature(endpoint)
    parameters = [one.replace(annotation=asked[name]) for name, one in signature.parameters.items()]
    del call.__wrapped__  # else FastAPI would look through to the endpoint's own signature
    vars(call)["__signature__"] = signature.replace(parameters=parameters, return_annotation=asked["return"])
    vars(call)[_DONE] = True
    return call


_DONE = "in_one_thread"


def _at_least(role: Role) -> object:
    async def check(principal: Viewer) -> Principal:
        if principal.role < role:
            raise Forbidden(
                f"role {role.word} is required; your token {principal.name!r} has role {principal.role.word}"
            )
        return principal

    return Depends(check)


Submitter = Annotated[Principal, _at_least(Role.SUBMITTER)]
Admin = Annotated[Principal, _at_least(Role.ADMIN)]


def find_run(session: Session, run_id: str, *, lock: bool = False) -> tuple[int, RunState] | None:
    """Number and state of a run. lock: SELECT … FOR UPDATE."""
    query = select(Run.number, Run.state).where(Run.id == run_id)
    row = session.execute(query.with_for_update() if lock else query).one_or_none()
    return None if row is None else (row.number, RunState(row.state))


def run_number(session: Session, run_id: str) -> int:
    """Row number of a run. Raises NotFound."""
    found = find_run(session, run_id)
    if found is None:
        raise NotFound(f"there is no run {run_id}")
    return found[0]


def _existing(run_id: RunId, _: Viewer, database: DatabaseDep) -> str:
    """Id of an existing run; the transaction ends before any file is read or sent."""
    with database.reading() as session:
        run_number(session, run_id)
    return run_id


ExistingRun = Annotated[str, Depends(_existing)]
