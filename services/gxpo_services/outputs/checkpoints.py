"""`/runs/{run_id}/checkpoints`: list the checkpoints on disk, and stream a policy as a zip archive.

A trainer may delete checkpoints at any time. It renames a folder before deleting it, so a folder under its name is
complete; checkpoints that are deleted during the listing are skipped."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import ExitStack, closing, suppress
from typing import Annotated, Any, BinaryIO

from fastapi import Header, Path
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from zipstream import ZipStream

from gxpo_services.api.dependencies import ExistingRun, Settings, held_slot, run_router
from gxpo_services.api.errors import Conflict, NotFound, RangeNotSatisfiable, responses
from gxpo_services.api.fields import MAX_INTEGER, MAX_STEP, JsonNumber, read_json
from gxpo_services.api.idempotency import etag
from gxpo_services.outputs.files import RunFiles


class CheckpointView(BaseModel):
    """A complete checkpoint."""

    step: int
    score: JsonNumber | None = Field(description="eval/average/pass@1 at that step, null without an evaluation.")
    size_bytes: int
    created_at: float
    best: bool = Field(description="Whether it has the best score; the earliest of equals.")
    newest: bool


class CheckpointsView(BaseModel):
    """Checkpoints on disk in order of steps."""

    items: list[CheckpointView]


CHECKPOINTS, MANIFEST, STATE, POLICY = "checkpoints", "manifest.json", "state.json", "policy"
MOST_FILES = 64
"""Maximum number of files of a policy; all are open during the download. A shard has 5 GB."""
_NAME = re.compile(r"step-(\d{8,10})")
_MOST_LISTED = 1000
"""The newest ones. A trainer keeps a few; what else writes into a run's folder is not trusted."""
_LARGEST_STATE = 2 * 1024 * 1024
"""What 40 requests at once may decode without exhausting the memory of the API."""


def stored_checkpoints(run: RunFiles) -> list[CheckpointView]:
    """Checkpoints in order of steps; the best and the newest one are marked."""
    try:
        names = run.names(CHECKPOINTS)
    except FileNotFoundError:
        return []
    checkpoints = []
    found = sorted(filter(None, map(_NAME.fullmatch, names)), key=lambda match: int(match[1]))
    for match in found[-_MOST_LISTED:]:
        with suppress(OSError, ValueError):  # deleted since it was listed, or not loadable
            checkpoints.append(_inspect(run, match[0], int(match[1])))
    scored = [checkpoint for checkpoint in checkpoints if isinstance(checkpoint.score, float)]  # else null or "NaN"
    if scored:
        max(scored, key=lambda checkpoint: (checkpoint.score, -checkpoint.step)).best = True
    if checkpoints:
        checkpoints[-1].newest = True
    return checkpoints


def open_policy(run: RunFiles, step: int, opened: ExitStack) -> list[tuple[str, BinaryIO]]:
    """Names and files of a checkpoint's policy, opened on a stack. Open files outlive the checkpoint's end.

    Raises FileNotFoundError; Conflict for more files than can be open at once.
    """
    name = f"step-{step:08d}"
    run.status(CHECKPOINTS, name, MANIFEST)  # a checkpoint without it is incomplete
    paths = run.files(CHECKPOINTS, name, POLICY)
    if not paths:
        raise FileNotFoundError(f"{name} has no policy")
    if len(paths) > MOST_FILES:
        raise Conflict(f"{name} has {len(paths)} files in {POLICY}/, more than {MOST_FILES}")
    return [("/".join(path), opened.enter_context(run.open(CHECKPOINTS, name, POLICY, *path))) for path in paths]


def archive_of(files: list[tuple[str, BinaryIO]]) -> tuple[ZipStream, str]:
    """A zip archive of open files, uncompressed because weights do not shrink, and its entity tag.

    The same files make the same bytes, so a download can continue where it was interrupted.
    """
    archive = ZipStream(sized=True)
    marks = []
    for name, file in files:
        # The path leads to the open file, even after the checkpoint was deleted; it gives size and time.
        # Bytes that are not UTF-8 have no place in its list.
        archive.add_path(f"/proc/self/fd/{file.fileno()}", name.encode(errors="replace").decode())
        status = os.fstat(file.fileno())
        marks.append([name, status.st_size, status.st_mtime_ns])
    return archive, etag(marks)


def pieces_of(archive: ZipStream, begin: int, end: int) -> Generator[bytes]:
    """Bytes of an archive from `begin` to before `end`, once; its files must be open meanwhile."""
    at = 0
    for piece in archive:
        if part := piece[max(0, begin - at) : max(0, end - at)]:
            yield part
        at += len(piece)
        if at >= end:
            return


def _inspect(run: RunFiles, name: str, step: int) -> CheckpointView:
    created_at = run.status(CHECKPOINTS, name, MANIFEST).st_mtime
    state: Any = read_json(run.read(CHECKPOINTS, name, STATE, most_bytes=_LARGEST_STATE))
    score = state.get("score") if isinstance(state, dict) else None
    size = sum(run.status(CHECKPOINTS, name, *path).st_size for path in run.files(CHECKPOINTS, name))
    if type(score) is not float and (type(score) is not int or abs(score) > MAX_INTEGER):
        score = None
    return CheckpointView(step=step, score=score, size_bytes=size, created_at=created_at, best=False, newest=False)


_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


def requested_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and the one after the last of a single range (RFC 9110, section 14); None for all, or several ranges.

    Raises RangeNotSatisfiable for a range behind the end.
    """
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    begin, end = (int(first), int(last) + 1 if last else size) if first else (max(0, size - int(last)), size)
    if last and first and int(last) < begin:
        return None
    if begin >= size:
        raise RangeNotSatisfiable(f"the file has {size} bytes, so none from byte {begin} on")
    return begin, min(end, size)


router = run_router()
_ZIP: dict[str, Any] = {"content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}}}


@router.get("/checkpoints", summary="Checkpoints")
def checkpoints(run_id: ExistingRun, settings: Settings) -> CheckpointsView:
    """Checkpoints on disk; the trainer keeps the latest and the best."""
    return CheckpointsView(items=stored_checkpoints(RunFiles(settings.artifacts, run_id)))


@router.get(
    "/checkpoints/{step}/download",
    summary="A checkpoint's policy",
    response_class=StreamingResponse,
    responses={200: _ZIP, 206: {"description": "The part that Range names.", **_ZIP}, **responses(409, 416, 429)},
)
def download_checkpoint(
    run_id: ExistingRun,
    step: Annotated[int, Path(ge=0, le=MAX_STEP)],
    settings: Settings,
    opened: Annotated[ExitStack, held_slot("download_slots")],
    range_: Annotated[str | None, Header(alias="Range", max_length=200, description="One range of bytes.")] = None,
    if_range: Annotated[str | None, Header(max_length=200, description="ETag of the earlier part.")] = None,
) -> StreamingResponse:
    """A zip archive of the policy's folder, loadable by transformers and vLLM. `Range` continues a download."""
    try:
        files = open_policy(RunFiles(settings.artifacts, run_id), step, opened)
    except FileNotFoundError:
        raise NotFound(f"run {run_id} has no checkpoint at step {step}") from None
    archive, tag = archive_of(files)
    size = len(archive)
    part = requested_range(range_, size) if if_range in (None, tag) else None
    begin, end = part or (0, size)
    headers = {
        "Content-Disposition": f'attachment; filename="{run_id}-step-{step}.zip"',
        "Content-Length": str(end - begin),
        "Accept-Ranges": "bytes",
        "ETag": tag,
        **({"Content-Range": f"bytes {begin}-{end - 1}/{size}"} if part else {}),
    }
    pieces = opened.enter_context(closing(pieces_of(archive, begin, end)))
    return StreamingResponse(pieces, 206 if part else 200, headers, "application/zip")
