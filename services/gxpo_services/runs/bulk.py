"""One action on many runs."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.orm import Session

from gxpo_services.access.principals import Principal
from gxpo_services.api.errors import Problem, ProblemDetails
from gxpo_services.run_states import RunState
from gxpo_services.runs import repository, service
from gxpo_services.runs.schemas import BulkAction, BulkAnswer, BulkItem, BulkRequest, RunPatch


def act_on_all(session: Session, root: Path, principal: Principal, request: BulkRequest) -> BulkAnswer:
    """Apply an action to each run; a run that refuses it does not stop the others."""
    items = []
    for run_id in dict.fromkeys(request.runs):
        problem = None
        try:
            state = _act(session, root, principal, run_id, request.action)
        except Problem as error:
            found = repository.find(session, run_id)
            state = None if found is None else RunState(found.state)
            problem = ProblemDetails(type=error.type, title=error.title, status=error.status, detail=error.detail)
        items.append(BulkItem(run=run_id, state=state, problem=problem))
    return BulkAnswer(items=items)


def _act(session: Session, root: Path, principal: Principal, run_id: str, action: BulkAction) -> RunState | None:
    """State of the run afterwards; None for a deleted one. Raises Problem."""
    if action == "delete":
        service.delete(session, root, principal, run_id)
        return None
    if action == "archive" or action == "unarchive":
        return service.patch(session, run_id, RunPatch(archived=action == "archive"), None, principal).state
    return service.act(session, run_id, action, actor=principal.actor).state
