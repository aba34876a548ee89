"""The run named in a path, or 404."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from sqlalchemy.orm import Session

from gxpo_services.api.dependencies import DatabaseDep, Viewer
from gxpo_services.api.errors import NotFound
from gxpo_services.api.fields import RunId
from gxpo_services.db.run_lookup import find_run


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
