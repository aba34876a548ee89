"""Schema migrations with Alembic, for SQLite and PostgreSQL."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine

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


def present_revision(engine: Engine) -> str | None:
    """The schema revision of a database; None when it is empty."""
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def is_usable(engine: Engine) -> bool:
    """Whether a database has this version's schema or a later one.

    While a cluster is upgraded, replicas of the version before continue after the migration, which adds and takes
    nothing away (docs/decisions/0005).
    """
    present, newest = present_revision(engine), newest_revision()
    return present is not None and present >= newest


def is_current(url: str) -> bool:
    """Whether a database has this version's schema."""
    engine = make_engine(url)
    try:
        return present_revision(engine) == newest_revision()
    finally:
        engine.dispose()


def need_current(url: str) -> None:
    """Raise ConfigError unless the database can be used by this version."""
    engine = make_engine(url)
    try:
        usable = is_usable(engine)
    finally:
        engine.dispose()
    if not usable:
        raise ConfigError("the database is not at this version's schema; run `gxpo migrate`")
