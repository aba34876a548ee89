"""How long a key is kept, on both databases."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, select
from support.scripted_launcher import ScriptedLauncher

from gxpo_services.api.idempotency import Creation, delete_expired_keys
from gxpo_services.api.principals import Principal, Role
from gxpo_services.db.database import Database
from gxpo_services.db.tables import IdempotencyKey
from gxpo_services.runs.schemas import CloneRequest
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


def test_old_keys_go_few_at_a_time(
    database: Database, scheduler: Scheduler, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLEANED_AT_ONCE", 3)
    add_keys(database, *[2 * WEEK_S] * 7, 0)
    left = []
    for _ in range(4):
        scheduler.tick()
        clock[0] += module.CLEAN_EVERY_S
        left.append(len(keys(database)))
    assert left == [5, 2, 1, 1]


def test_a_full_batch_fits_one_statement(database: Database) -> None:
    add_keys(database, *[2 * WEEK_S] * (module.CLEANED_AT_ONCE + 1))
    with database.writing() as session:
        assert delete_expired_keys(session, NOW, module.CLEANED_AT_ONCE) == module.CLEANED_AT_ONCE
    assert len(keys(database)) == 1


def test_the_time_is_a_setting(database: Database, settings: ServiceSettings) -> None:
    add_keys(database, 30, 90)
    short = settings.model_copy(update={"idempotency_s": 60.0})
    Scheduler(database, short, ScriptedLauncher(), api_answers=lambda: True, clock=lambda: NOW).tick()
    assert keys(database) == {"k0"}


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_key_that_vanishes_is_free(database: Database, database_url: str, settings: ServiceSettings) -> None:
    """PostgreSQL alone lets others write between two statements of a transaction."""
    add_keys(database, 2 * WEEK_S)
    other = Database(database_url)
    deleted = []

    def delete_it(*arguments: Any) -> None:
        if arguments[2].startswith("INSERT INTO idempotency_keys") and not deleted:
            with other.writing() as session:
                deleted.append(delete_expired_keys(session, NOW, 10))

    event.listen(database.engine, "after_cursor_execute", delete_it)
    with database.writing() as session:
        request = Creation(Principal("t1", "me", Role.ADMIN), settings, session, request=None, key="k0")
        made, is_new = request.claim("clone r1", CloneRequest(), "r")
        assert is_new
    other.close()
    assert deleted == [1]
    with database.reading() as session:
        assert session.get_one(IdempotencyKey, ("t1", "k0")).resource_id == made
