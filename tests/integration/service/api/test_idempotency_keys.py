"""How long a key is kept, on both databases."""

from __future__ import annotations

import pytest
from sqlalchemy import select
from support.scripted_launcher import ScriptedLauncher

from gxpo_services.db.database import Database
from gxpo_services.db.tables import IdempotencyKey
from gxpo_services.scheduling import scheduler as module
from gxpo_services.scheduling.scheduler import Scheduler
from gxpo_services.settings import ServiceSettings

pytestmark = pytest.mark.each_database

NOW = 1_800_000_000.0
WEEK_S = 7 * 24 * 3600


def add_keys(database: Database, *ages_s: float) -> None:
    """Keys k0, k1, … that were used so long before NOW."""
    with database.writing() as session:
        for number, age_s in enumerate(ages_s):
            key = IdempotencyKey(
                token_id="t1", key=f"k{number}", body_sha256="0" * 64, resource_id="r1", created_at=NOW - age_s
            )
            session.add(key)


def keys(database: Database) -> set[str]:
    with database.reading() as session:
        return set(session.scalars(select(IdempotencyKey.key)))


@pytest.fixture
def clock() -> list[float]:
    """The scheduler's time, to be changed in place."""
    return [NOW]


@pytest.fixture
def scheduler(database: Database, settings: ServiceSettings, clock: list[float]) -> Scheduler:
    return Scheduler(database, settings, ScriptedLauncher(), api_answers=lambda: True, clock=lambda: clock[0])


def test_keys_are_forgotten_after_a_week(database: Database, scheduler: Scheduler, clock: list[float]) -> None:
    add_keys(database, 0, WEEK_S - 1, WEEK_S + 1, 10 * WEEK_S)
    scheduler.tick()
    assert keys(database) == {"k0", "k1"}
    clock[0] += 2
    scheduler.tick()
    assert keys(database) == {"k0", "k1"}, "it does not look in every round"
    clock[0] += module.CLEAN_EVERY_S
    scheduler.tick()
    assert keys(database) == {"k0"}
