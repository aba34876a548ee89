"""First start on one machine: database schema and local admin token."""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy.orm import Session

from gxpo_services.api.principals import find_by_secret
from gxpo_services.auth.tokens import TokenRequest, create
from gxpo_services.db.database import Database
from gxpo_services.db.migrate import upgrade
from gxpo_services.settings import ServiceSettings, make_home


def prepare_local(settings: ServiceSettings) -> None:
    """Migrate the database and create the local token if it is missing. Idempotent."""
    make_home(settings)
    upgrade(settings.url)
    database = Database(settings.url)
    try:
        with database.writing() as session:
            ensure_local_token(session, settings.local_token_file)
    finally:
        database.close()


def ensure_local_token(session: Session, file: Path) -> str:
    """The local admin token: read from its file, or created at the first start (mode 0600)."""
    if file.exists():
        secret = file.read_text(encoding="utf-8").strip()
        if find_by_secret(session, secret) is not None:
            return secret
    made = create(session, TokenRequest(name="local", role="admin"), actor="first start")
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, made.token + "\n")
    return made.token


def replace_file(file: Path, content: str, mode: int = 0o600) -> None:
    """Replace a file, atomically; by default with one that only its owner can read."""
    partial = file.with_name(file.name + ".part")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)
