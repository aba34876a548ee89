"""Runs written directly to the database and read from there."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, func, inspect, select

from gxpo_services.api.principals import Principal, Role
from gxpo_services.db.database import Database, note_change
from gxpo_services.db.tables import Event, Run, metadata
from gxpo_services.outputs import metrics
from gxpo_services.run_states import Action, RunState, requested_state
from gxpo_services.runs import lifecycle, service
from gxpo_trainer.config import RunConfig


def add_run(database: Database, **values: Any) -> str:
    """A queued run of the starter policy; its id."""
    run = service.new_run(RunConfig(name="test"), Principal("t1", "tests", Role.SUBMITTER))
    for name, value in {"cpus": 1.0, "gpus": 0.0, "step_budget": None, **values}.items():
        setattr(run, name, value)
    with database.writing() as session:
        session.add(run)
        return run.id


def get(database: Database, run_id: str) -> Run:
    with database.reading() as session:
        return session.scalars(select(Run).where(Run.id == run_id)).one()


def row(database: Database, run_id: str) -> dict[str, Any]:
    """All columns of a run."""
    run = get(database, run_id)
    return {column.key: getattr(run, column.key) for column in inspect(Run).column_attrs}


def change(database: Database, run_id: str, **values: Any) -> None:
    with database.writing() as session:
        run = session.scalars(select(Run).where(Run.id == run_id)).one()
        for name, value in values.items():
            setattr(run, name, value)
        note_change(session)


def move(database: Database, run_id: str, new: RunState) -> None:
    with database.writing() as session:
        run = session.scalars(select(Run).where(Run.id == run_id)).one()
        lifecycle.move(session, run, new, actor="tests", message="")


def request(database: Database, run_id: str, action: Action, *, at: float) -> None:
    """A user's cancel, pause or resume request."""
    new = requested_state(RunState(get(database, run_id).state), action)
    assert new is not None
    move(database, run_id, new)
    if new in (RunState.PAUSING, RunState.CANCELLING):
        change(database, run_id, request_at=at)


def report(database: Database, run_id: str, *, at: float) -> None:
    """The first heartbeat of a launch."""
    if get(database, run_id).state in (RunState.STARTING, RunState.RECOVERING):
        move(database, run_id, RunState.RUNNING)
    change(database, run_id, heartbeat_at=at)


def messages(database: Database, run_id: str) -> list[tuple[str, str]]:
    """Kind and message of each event of a run, oldest first."""
    with database.reading() as session:
        query = select(Event).join(Run, Run.number == Event.run_number).where(Run.id == run_id).order_by(Event.number)
        return [(event.kind, event.message) for event in session.scalars(query)]


def curve(database: Database, run_id: str, name: str) -> list[tuple[int, float]]:
    """Steps and values of a metric in the history that counts."""
    number = get(database, run_id).number
    with database.reading() as session:
        names = metrics.find_numbers(session, [name])
        stored = metrics.histories(session, list(names.values()), metrics.first_steps(session, [number]))
    return [pair for records in stored.values() for pair in records.tolist()]


def all_rows(engine: Engine) -> dict[str, list[dict[str, Any]]]:
    """Everything that a database holds, by table, in an order in which it can be written again."""
    with engine.connect() as connection:
        return {
            table.name: [dict(row) for row in connection.execute(select(table).order_by(*table.primary_key)).mappings()]
            for table in metadata.sorted_tables
        }


def count(database: Database, table: type = Run) -> int:
    with database.reading() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0
