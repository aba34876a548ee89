"""The run that a path names: its number, or 404."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from sqlalchemy.orm import Session

from gxpo_services.api.dependencies import DatabaseDep, Viewer
from gxpo_services.api.errors import NotFound
from gxpo_services.api.fields import RunId
from gxpo_services.db.run_lookup import find_run


def run_number(session: Session, run_id: str) -> int:
    """Raises NotFound."""
    found = find_run(session, run_id)
    if found is None:
        raise NotFound(f"there is no run {run_id}")
    return found[0]


def _existing(run_id: RunId, _: Viewer, database: DatabaseDep) -> str:
    """The id of a run that exists, looked up in a transaction that ends before files are read or sent."""
    with database.reading() as session:
        run_number(session, run_id)
    return run_id


ExistingRun = Annotated[str, Depends(_existing)]
