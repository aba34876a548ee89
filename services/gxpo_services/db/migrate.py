"""Schema migrations with Alembic, for SQLite and PostgreSQL."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from gxpo_services.db.database import make_engine
from gxpo_trainer.errors import ConfigError

SCRIPTS = Path(__file__).parent / "migrations"


def alembic_config(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    # Passed as an attribute: a % in a password would be read as interpolation in an option.
    config.attributes["url"] = url
    return config


def upgrade(url: str, revision: str = "head") -> None:
    """Run all pending migrations; concurrent callers are serialized (migrations/env.py)."""
    command.upgrade(alembic_config(url), revision)


@cache
def newest_revision() -> str:
    """The schema revision of this version of the code; revisions are numbers of four digits."""
    head = ScriptDirectory(str(SCRIPTS)).get_current_head()
    assert head is not None
    return head


def present_revision(connection: Connection) -> str | None:
    """The schema revision of a database; None when it is empty."""
    return MigrationContext.configure(connection).get_current_revision()


def revision_at(url: str) -> str | None:
    """The schema revision of the database at `url`, read over a connection of its own; None when it is empty."""
    engine = make_engine(url)
    try:
        with engine.connect() as connection:
            return present_revision(connection)
    finally:
        engine.dispose()


def is_usable(present: str | None) -> bool:
    """Whether a schema revision is this version's or a later one.

    While a cluster is upgraded, replicas of the version before continue after the migration, which adds and takes
    nothing away (docs/decisions/0005).
    """
    return present is not None and present >= newest_revision()


def is_current(url: str) -> bool:
    """Whether a database has this version's schema."""
    return revision_at(url) == newest_revision()


def need_current(url: str) -> None:
    """Raise ConfigError unless the database can be used by this version."""
    if not is_usable(revision_at(url)):
        raise ConfigError("the database is not at this version's schema; run `gxpo migrate`")
