"""`/studies`: several arms, each at its own best learning rate, on several seeds."""

from __future__ import annotations

from fastapi import APIRouter, Response

from gxpo_services.api.answers import answer
from gxpo_services.api.dependencies import ReadSession, ServiceRoute, Viewer
from gxpo_services.api.errors import responses
from gxpo_services.api.fields import GroupId
from gxpo_services.api.submission import Submission, creation_responses
from gxpo_services.studies import service
from gxpo_services.studies.schemas import StudyRequest, StudyView

router = APIRouter(route_class=ServiceRoute, tags=["studies"], responses=responses(401, 403, 422, 503))


@router.post(
    "/studies",
    status_code=201,
    summary="Submit a study",
    response_model=StudyView,
    responses=creation_responses(StudyView, "study", "Created.", "The study that this key created before."),
)
def submit_study(body: StudyRequest, by: Submission) -> Response:
    """Queue the runs that can start now; the scheduler queues the next ones when a run has ended.

    The answer states the cost as an upper bound. Compare the runs with `/compare?groups=`.
    """
    made, is_new = service.submit(by.session, by.settings, by.principal, body, by.key)
    return by.created(made, is_new, "get_study", group_id=made.group.id)


@router.get("/studies/{group_id}", summary="A study", response_model=StudyView, responses=responses(404, 409))
def get_study(group_id: GroupId, _: Viewer, session: ReadSession) -> Response:
    """How far the study is: best learning rates, seeds done, and failed runs that it waits for."""
    return answer(service.get(session, group_id))
