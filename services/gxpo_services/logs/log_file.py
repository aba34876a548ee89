"""Read the log of a run, and follow it as Server-Sent Events."""

from __future__ import annotations

import codecs
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import anyio
from anyio.to_thread import run_sync

from gxpo_services.api import sse
from gxpo_services.artifacts.run_files import RunFiles

LOG = "train.log"
LARGEST_PIECE = 1 << 20
_CONTINUATION = bytes(range(0x80, 0xC0))
"""Bytes of a UTF-8 character after its first one."""
_Decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Text from byte `offset` to `next_offset` of a log of `size` bytes. was_cut: the log is shorter than
    `offset`, so it was restarted."""

    text: str
    offset: int
    next_offset: int
    size: int
    was_cut: bool = False


def read_log(run: RunFiles, offset: int, limit: int) -> LogPiece:
    """At most `limit` bytes from `offset`; a negative offset counts from the end.

    An incomplete UTF-8 character is left for the next call. A missing log is empty; a log shorter than `offset` is read
    from its beginning.
    """
    try:
        file = run.open(LOG)
    except FileNotFoundError:
        return LogPiece("", 0, 0, 0, was_cut=offset > 0)
    with file:
        size = os.fstat(file.fileno()).st_size
        was_cut = offset > size
        begin = max(0, size + offset) if offset < 0 else (0 if was_cut else offset)
        data = os.pread(file.fileno(), limit, begin)
    if offset < 0:  # may begin within a character
        whole = data[:3].lstrip(_CONTINUATION) + data[3:]
        begin, data = begin + len(data) - len(whole), whole
    decoder = _Decoder("replace")
    text = decoder.decode(data)
    incomplete, _ = decoder.getstate()
    return LogPiece(text, begin, begin + len(data) - len(incomplete), size, was_cut)


async def follow(
    run: RunFiles,
    is_over: Callable[[], bool],
    may_read: Callable[[], bool],
    offset: int,
    *,
    pause_s: float = 0.5,
    heartbeat_s: float = 10.0,
) -> AsyncIterator[bytes]:
    """Server-Sent Events of a log from a byte on, until the run is over and its log is read.

        event: log         data: {"text", "offset", "next_offset"}, id: next_offset
        event: truncated   the log was restarted; the following text is from its beginning
        event: end         the run has ended
        event: revoked     the reader's token is no longer valid

    A comment every `heartbeat_s` seconds without text keeps the connection open. is_over: whether the run has ended;
    called in a thread, like the reads. may_read: whether the reader's token is still valid; asked before each read.
    """
    yield b": log\n\n"
    quiet_s = 0.0
    while True:
        # Checked before the read, so that the last output is not missed.
        over = await run_sync(is_over)
        if not await run_sync(may_read):
            yield sse.event("revoked", {"next_offset": offset})
            return
        piece = await run_sync(read_log, run, offset, LARGEST_PIECE)
        if piece.was_cut:
            yield sse.event("truncated", {"offset": 0})
        offset = piece.next_offset
        if piece.text:
            data = {"text": piece.text, "offset": piece.offset, "next_offset": offset}
            yield sse.event("log", data, offset)
            quiet_s = 0.0
            continue
        if over:
            yield sse.event("end", {"next_offset": offset})
            return
        await anyio.sleep(pause_s)
        quiet_s += pause_s
        if quiet_s >= heartbeat_s:
            yield sse.COMMENT
            quiet_s = 0.0
