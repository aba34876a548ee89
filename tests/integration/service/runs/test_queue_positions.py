"""Queue positions: the same on both databases, and at a cost that grows as the queue does."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import event, insert, select, update
from support import queued_runs as runs

from gxpo_services.db.database import Database
from gxpo_services.db.tables import Run
from gxpo_services.run_states import RunState
from gxpo_services.runs.listing import list_rows

pytestmark = pytest.mark.each_database


def add_queue(database: Database, amount: int) -> list[int]:
    """Queued runs with many equal priorities and times; their numbers."""
    values = runs.row(database, runs.add_run(database))
    del values["number"]
    random.seed(amount)
    rows = [
        values | {"id": f"r{n:020d}", "priority": random.randrange(3), "queued_at": float(random.randrange(40))}
        for n in range(1, amount)
    ]
    with database.writing() as session:
        session.execute(insert(Run), rows)
        return list(session.scalars(select(Run.number).order_by(Run.number)))


def test_positions_are_the_ranks_by_priority_age_and_number(database: Database) -> None:
    numbers = add_queue(database, 200)
    with database.writing() as session:
        session.execute(update(Run).where(Run.number.in_(numbers[::7])).values(state=RunState.PAUSED))
    with database.reading() as session:
        rows = {row["number"]: row for row in list_rows(session, numbers)}
    queued = [row for row in rows.values() if row["state"] == RunState.QUEUED]
    ages = queued_at(database)
    ranked = sorted(queued, key=lambda row: (-row["priority"], ages[row["number"]], row["number"]))
    assert [row["queue_position"] for row in ranked] == list(range(1, len(queued) + 1))
    assert all(rows[number]["queue_position"] is None for number in numbers[::7])


def queued_at(database: Database) -> dict[int, float]:
    with database.reading() as session:
        return {row.number: row.queued_at for row in session.execute(select(Run.number, Run.queued_at))}


def instructions(database: Database, numbers: list[int]) -> int:
    """Instructions of SQLite's virtual machine, in hundreds, for showing these runs."""
    counted = 0

    def count() -> int:
        nonlocal counted
        counted += 1
        return 0

    def watch(connection: sqlite3.Connection, _: object, __: object) -> None:
        connection.set_progress_handler(count, 100)

    event.listen(database.engine, "checkout", watch)
    try:
        with database.reading() as session:
            assert len(list_rows(session, numbers)) == len(numbers)
    finally:
        event.remove(database.engine, "checkout", watch)
    return counted


def test_the_cost_of_a_queue_grows_in_proportion_to_its_length(sqlite_template: Path, tmp_path: Path) -> None:
    costs = []
    for amount in (500, 2000):
        file = tmp_path / f"{amount}.sqlite"
        file.write_bytes(sqlite_template.read_bytes())
        database = Database(f"sqlite:///{file}")
        costs.append(instructions(database, add_queue(database, amount)))
        database.close()
    # 4 if in proportion, 16 if each run of the queue is compared with each other one
    assert costs[1] / costs[0] < 6
