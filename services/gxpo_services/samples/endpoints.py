"""What a run left behind: samples, evaluations, events, its log, its checkpoints."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Query
from fastapi.responses import StreamingResponse
from pydantic import StringConstraints

from gxpo_services.deps import DatabaseDep, ReadSession, ServiceRoute, Settings, Viewer
from gxpo_services.errors import responses
from gxpo_services.fields import MAX_INTEGER, RunId, Text
from gxpo_services.run_files import RunFiles
from gxpo_services.samples import log, service
from gxpo_services.samples.checkpoints import zipped
from gxpo_services.samples.schemas import CheckpointsView, EvaluationsView, EventPage, LogView, SamplePage

router = APIRouter(
    route_class=ServiceRoute, prefix="/runs/{run_id}", tags=["samples"], responses=responses(401, 404, 422, 503)
)

_MOST = 2**31 - 1
Step = Annotated[int | None, Query(ge=0, le=_MOST, description="Only this step.")]
Offset = Annotated[int, Query(ge=-MAX_INTEGER, le=MAX_INTEGER, description="Byte to begin at; negative: from the end.")]


def _existing(run_id: RunId, _: Viewer, database: DatabaseDep) -> str:
    """The id of a run that exists, looked up in a transaction that ends before files are read or sent."""
    with database.reading() as session:
        service.run_number(session, run_id)
    return run_id


Existing = Annotated[str, Depends(_existing)]


@router.get("/samples", summary="Responses and their verdicts")
def samples(
    run_id: RunId,
    _: Viewer,
    session: ReadSession,
    step: Step = None,
    verdict: Annotated[
        Annotated[Text, StringConstraints(max_length=20)] | None, Query(description="Only these, e.g. `wrong`.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[Annotated[Text, StringConstraints(max_length=40)] | None, Query()] = None,
) -> SamplePage:
    """What the policy answered in training, of the history that counts, page by page."""
    return service.samples(session, run_id, step=step, verdict=verdict, limit=limit, cursor=cursor)


@router.get("/evaluations", summary="Evaluations")
def evaluations(
    run_id: RunId,
    _: Viewer,
    session: ReadSession,
    benchmark: Annotated[Annotated[Text, StringConstraints(max_length=200)] | None, Query()] = None,
    after: Annotated[int | None, Query(ge=-1, le=_MOST, description="Only of later steps.")] = None,
    per_problem: Annotated[bool, Query(description="With the score of each problem.")] = True,
) -> EvaluationsView:
    """Benchmarks during training, one record a step and benchmark, of the history that counts."""
    return service.evaluations(session, run_id, benchmark=benchmark, after=after, per_problem=per_problem)


@router.get("/events", summary="What happened to a run")
def events(
    run_id: RunId,
    _: Viewer,
    session: ReadSession,
    after: Annotated[int, Query(ge=0, le=MAX_INTEGER, description="Number of the last event you have.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> EventPage:
    """Changes of state, deeds of people and of the scheduler, and what the trainer noted, in order."""
    return service.events(session, run_id, after=after, limit=limit)


@router.get("/logs", summary="A part of the log")
def logs(
    run_id: Existing,
    settings: Settings,
    offset: Offset = 0,
    limit: Annotated[int, Query(ge=4, le=log.LARGEST_PIECE, description="Most bytes.")] = 65_536,
) -> LogView:
    """What the run's job printed. A job that has not begun to print has an empty log."""
    return service.read_log(settings, run_id, offset, limit)


@router.get(
    "/logs/stream",
    summary="The log as it grows",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def stream_log(
    run_id: Existing,
    settings: Settings,
    database: DatabaseDep,
    offset: Offset = 0,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_INTEGER, description="Go on from there.")] = None,
) -> StreamingResponse:
    """Server-Sent Events: `log` with {text, offset, next_offset}, `truncated` when the log was begun anew, and `end`
    when the run has ended and all of its log is sent."""
    begin = last_event_id if last_event_id is not None else offset
    run = RunFiles(settings.artifacts, run_id)
    stream = log.follow(run, lambda: service.is_over(database, run_id), begin)
    return StreamingResponse(stream, media_type="text/event-stream")


@router.get("/checkpoints", summary="Checkpoints")
def checkpoints(run_id: Existing, settings: Settings) -> CheckpointsView:
    """Checkpoints that are on the disk now; the trainer keeps the newest and the best."""
    return service.list_checkpoints(settings, run_id)


@router.get(
    "/checkpoints/{step}/download",
    summary="A checkpoint's policy",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}}},
        **responses(409),
    },
)
def download_checkpoint(
    run_id: Existing, step: Annotated[int, Path(ge=0, le=_MOST)], settings: Settings
) -> StreamingResponse:
    """A zip file of the policy's folder, which transformers and vLLM load as it is."""
    files = service.open_policy(settings, run_id, step)
    headers = {"Content-Disposition": f'attachment; filename="{run_id}-step-{step}.zip"'}
    return StreamingResponse(zipped(files), media_type="application/zip", headers=headers)
