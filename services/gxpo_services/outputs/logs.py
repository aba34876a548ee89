"""`/runs/{run_id}/logs`: read the log of a run's jobs, and follow it as Server-Sent Events."""

from __future__ import annotations

import codecs
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Annotated

import anyio
from anyio.to_thread import run_sync
from fastapi import Header, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from gxpo_services.api.dependencies import (
    BearerToken,
    DatabaseDep,
    ExistingRun,
    Settings,
    Viewer,
    held_slot,
    run_numbers,
    run_router,
)
from gxpo_services.api.errors import responses
from gxpo_services.api.feed import COMMENT, CONTENT, MEDIA_TYPE, Subscription, sse
from gxpo_services.api.fields import MAX_INTEGER, RunId
from gxpo_services.outputs.files import RunFiles


class LogView(BaseModel):
    """A section of the log. Offsets and sizes are in bytes."""

    text: str = Field(description="The text; invalid UTF-8 is replaced by U+FFFD.")
    offset: int = Field(description="Offset of the text.")
    next_offset: int = Field(description="Offset of the next read.")
    size: int = Field(description="Current size of the log.")


LOG = "train.log"
LARGEST_PIECE = 1 << 20
_CONTINUATION = bytes(range(0x80, 0xC0))
"""Bytes of a UTF-8 character after its first one."""
_Decoder = codecs.getincrementaldecoder("utf-8")


def read_log(run: RunFiles, offset: int, limit: int) -> LogView:
    """At most `limit` bytes from `offset`.

    A negative offset counts from the end. An incomplete UTF-8 character is left for the next call. A missing log is
    empty; a log shorter than `offset` is read from its beginning.
    """
    try:
        file = run.open(LOG)
    except FileNotFoundError:
        return LogView(text="", offset=0, next_offset=0, size=0)
    with file:
        size = os.fstat(file.fileno()).st_size
        begin = max(0, size + offset) if offset < 0 else (0 if offset > size else offset)
        data = os.pread(file.fileno(), limit, begin)
    if offset < 0:  # may begin within a character
        whole = data[:3].lstrip(_CONTINUATION) + data[3:]
        begin, data = begin + len(data) - len(whole), whole
    decoder = _Decoder("replace")
    text = decoder.decode(data)
    end = begin + len(data) - len(decoder.getstate()[0])
    return LogView(text=text, offset=begin, next_offset=end, size=size)


async def follow(run: RunFiles, changes: Subscription, offset: int) -> AsyncIterator[bytes]:
    """Server-Sent Events of a log from a byte on, until the run is over and its log is read.

        event: log         data: {"text", "offset", "next_offset"}, id: next_offset
        event: truncated   the log was restarted; the following text is from its beginning
        event: end         the run has ended
        event: revoked     the reader's token is no longer valid

    A comment every ten seconds without text keeps the connection open. changes: of the run. The file is read twice a
    second, because file systems of clusters do not tell of writes of other hosts.
    """
    yield b": log\n\n"
    quiet_since = anyio.current_time()
    while True:
        # Checked before the read, so that the last output is not missed.
        over = changes.is_over
        if changes.end is not None:
            if changes.end == "revoked":
                yield sse("revoked", {"next_offset": offset})
            return
        piece = await run_sync(read_log, run, offset, LARGEST_PIECE)
        if piece.size < offset:
            yield sse("truncated", {"offset": 0})
        offset = piece.next_offset
        if piece.text:
            yield sse("log", piece.model_dump(exclude={"size"}), offset)
            quiet_since = anyio.current_time()
            continue
        if over:
            yield sse("end", {"next_offset": offset})
            return
        await changes.wait(0.5)
        if anyio.current_time() - quiet_since >= 10.0:
            yield COMMENT
            quiet_since = anyio.current_time()


router = run_router()

Offset = Annotated[int, Query(ge=-MAX_INTEGER, le=MAX_INTEGER, description="First byte; negative: from the end.")]


@router.get("/logs", summary="Read the log")
def logs(
    run_id: ExistingRun,
    settings: Settings,
    offset: Offset = 0,
    limit: Annotated[int, Query(ge=4, le=LARGEST_PIECE, description="Maximum number of bytes.")] = 65_536,
) -> LogView:
    """Output of the run's jobs, from a byte offset."""
    return read_log(RunFiles(settings.artifacts, run_id), offset, limit)


@router.get(
    "/logs/stream",
    summary="Stream the log",
    response_class=StreamingResponse,
    responses={200: CONTENT, **responses(429)},
)
async def stream_log(
    request: Request,
    _: Viewer,
    held: Annotated[ExitStack, held_slot("stream_slots")],
    run_id: RunId,
    settings: Settings,
    database: DatabaseDep,
    token: BearerToken,
    offset: Offset = 0,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_INTEGER, description="Offset to resume from.")] = None,
) -> StreamingResponse:
    """Server-Sent Events: `log` with {text, offset, next_offset}, `truncated` when the log was restarted, `end` when
    the run has ended and its whole log has been sent, `revoked` when the token has become invalid."""
    begin = last_event_id if last_event_id is not None else offset
    changes = Subscription(token, await run_sync(run_numbers, database, [run_id]))
    held.enter_context(request.app.state.changes.following(changes))
    log = follow(RunFiles(settings.artifacts, run_id), changes, begin)
    return StreamingResponse(log, media_type=MEDIA_TYPE)
