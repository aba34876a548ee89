"""Schema migrations with Alembic, and back-up and restore of a SQLite database. PostgreSQL has pg_dump."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import make_url

from gxpo_services.db.database import make_engine
from gxpo_trainer.errors import ConfigError, DataError

SCRIPTS = Path(__file__).parent / "migrations"


def alembic_config(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    # Passed as an attribute: a % in a password would be read as interpolation in an option.
    config.attributes["url"] = url
    return config


def upgrade(url: str) -> None:
    """Run all pending migrations; concurrent callers are serialized (migrations/env.py).

    Raises ConfigError for a database of a version from before the baseline, of a newer version, or of another program.
    """
    try:
        command.upgrade(alembic_config(url), "head")
    except CommandError as error:
        revision, newest = revision_at(url), newest_revision()
        later = revision is not None and revision > newest
        fix = "use the version of gxpo that wrote it" if later else "migrate it with a version that has both first"
        raise ConfigError(f"cannot migrate the database from revision {revision} to {newest}: {error}; {fix}") from None


@cache
def newest_revision() -> str:
    """The schema revision of this version of the code; revisions are numbers of four digits."""
    head = ScriptDirectory(str(SCRIPTS)).get_current_head()
    assert head is not None
    return head


def revision_at(url: str) -> str | None:
    """The schema revision of the database at `url`, read over a connection of its own; None when it is empty or not
    made yet."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        return None  # a connection would make the file
    engine = make_engine(url)
    try:
        with engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    finally:
        engine.dispose()


def is_usable(present: str | None) -> bool:
    """Whether a schema revision is this version's or a later one.

    While a cluster is upgraded, replicas of the version before continue after the migration, which adds and takes
    nothing away (docs/decisions/0005).
    """
    return present is not None and present >= newest_revision()


def need_current(url: str) -> None:
    """Raise ConfigError unless the database can be used by this version."""
    if not is_usable(revision_at(url)):
        raise ConfigError("the database is not at this version's schema; run `gxpo migrate`")


def back_up(url: str, target: Path) -> int:
    """Copy the database of a service, which may be in use, to a new file (mode 0600); returns its size in bytes.

    The copy is consistent and replaces `target` only when it is complete and on disk. Raises ConfigError, DataError.
    """
    source = _file_of(url)
    if target.is_dir():
        raise ConfigError(f"cannot write the back-up {target}: it is a folder; name a file in it")
    _need_another(target, source)
    part = target.with_name(target.name + ".part")
    try:
        part.unlink(missing_ok=True)
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with closing(sqlite3.connect(source)) as database, closing(sqlite3.connect(part)) as copy:
            # In steps, a write in between restarts the copy: a busy service would never finish it.
            database.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, without -wal and -shm
        _check(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(target)
        return target.stat().st_size
    except OSError as error:
        raise ConfigError(f"cannot write the back-up {target}: {error.strerror}") from None
    except sqlite3.Error as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL:
            raise ConfigError(f"cannot write the back-up {target}: {error}") from None
        raise DataError(f"cannot back up {source}: {error}") from None
    finally:
        with suppress(OSError):
            part.unlink()


def restore(url: str, backup: Path) -> Path | None:
    """Replace the database of a stopped service by a back-up, and migrate it to this version's schema.

    One too damaged to be overwritten is moved aside, in place of an earlier one; returns where, else None. Raises
    ConfigError when a process uses the database or it cannot be written; DataError when the back-up is not one of a
    service, or was made by a newer version or by one too old to be migrated.
    """
    target = _file_of(url, must_exist=False)
    revision, newest = _check(backup), newest_revision()
    aside = target.with_name(f"{target.name}.damaged")
    _need_another(backup, target)
    _need_another(backup, aside, "has the name that a damaged database gets; rename it first")
    if revision > newest:
        raise DataError(
            f"{backup} was made by a newer version of gxpo: its schema is {revision}, this version's {newest}; "
            "upgrade gxpo first"
        )
    if revision not in {script.revision for script in ScriptDirectory(str(SCRIPTS)).walk_revisions()}:
        raise DataError(
            f"{backup} has schema {revision}, which this version cannot migrate to {newest}; restore it with a version "
            "that can, and back it up there"
        )
    damaged = None
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            _overwrite(target, backup)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            damaged = aside
            for suffix in ("", "-wal", "-shm"):  # SQLite would apply the latter to the new file
                with suppress(FileNotFoundError):
                    Path(f"{target}{suffix}").replace(f"{damaged}{suffix}")
            _overwrite(target, backup)
        target.chmod(0o600)
    except sqlite3.Error as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
            raise ConfigError(f"{target} is in use ({error}); stop the service first") from None
        raise ConfigError(f"cannot write {target}: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from None
    upgrade(url)
    return damaged


def _overwrite(target: Path, backup: Path) -> None:
    with closing(sqlite3.connect(backup)) as copy, closing(sqlite3.connect(target, timeout=1.0)) as database:
        # Only the last connection can end the WAL mode: nobody else uses the database.
        database.execute("PRAGMA journal_mode=DELETE")
        # Taken here and kept: the copy would wait for another user's lock without end.
        database.execute("PRAGMA locking_mode=EXCLUSIVE")
        database.execute("BEGIN EXCLUSIVE")
        database.rollback()
        copy.backup(database)


def _need_another(file: Path, other: Path, why: str = "is the service's database itself; name another file") -> None:
    with suppress(OSError):  # one of them does not exist
        if file.samefile(other):
            raise ConfigError(f"{file} {why}")


def _file_of(url: str, *, must_exist: bool = True) -> Path:
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        raise ConfigError("the service's database is not SQLite; use pg_dump and pg_restore (docs/operations.md)")
    file = Path(parsed.database)
    if must_exist and not file.exists():
        raise ConfigError(f"there is no database {file}; check --home or GXPO_DATABASE_URL")
    return file


def _check(file: Path) -> str:
    """The schema revision of a back-up. Raises DataError unless the file is an intact database of a service."""
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as database:
            (result,) = database.execute("PRAGMA quick_check(1)").fetchone()
            row = database.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.Error as error:
        raise DataError(f"{file} is not a back-up of a service: {error}") from None
    if result != "ok":
        raise DataError(f"{file} is damaged: {result}")
    if row is None:
        raise DataError(f"{file} is not a back-up of a service: it has no schema revision")
    return str(row[0])
