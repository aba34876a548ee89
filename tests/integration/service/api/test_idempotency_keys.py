"""How long a key is kept, on both databases."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, select
from support.scheduling import Cluster

from gxpo_services.api.idempotency import Creation, delete_expired_keys
from gxpo_services.api.principals import Principal, Role
from gxpo_services.db.database import Database
from gxpo_services.db.tables import IdempotencyKey
from gxpo_services.runs.schemas import CloneRequest
from gxpo_services.scheduling.scheduler import CLEAN_EVERY_S, CLEANED_AT_ONCE
from gxpo_services.settings import ServiceSettings

pytestmark = pytest.mark.each_database

NOW = 1_800_000_000.0
"""Of a cluster's clock."""
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


def test_keys_are_deleted_a_batch_at_a_time_after_a_week_or_as_set(
    database: Database, settings: ServiceSettings
) -> None:
    cluster = Cluster(database, settings)
    add_keys(database, 0, WEEK_S - 1, *[WEEK_S + 1] * (CLEANED_AT_ONCE + 1))
    scheduler = cluster.scheduler()
    left = []
    for seconds in (0, 2, CLEAN_EVERY_S):
        cluster.clock.passes(seconds)
        scheduler.tick()
        left.append(keys(database))
    assert {"k0", "k1"} < left[0], "younger ones are kept"
    assert [len(each) for each in left] == [3, 3, 1], "it does not look in every round"
    assert left[2] == {"k0"}
    cluster.scheduler(idempotency_s=CLEAN_EVERY_S).tick()
    assert keys(database) == set()


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
