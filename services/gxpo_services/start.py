"""What the processes of a service do first: read the settings, prepare the database, make the local token."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from gxpo_services.settings import ServiceSettings
from gxpo_trainer.errors import ConfigError


def read_settings(**given: Any) -> ServiceSettings:
    """The settings of the environment with those that are given over them.

    Raises ConfigError that names each bad one by its variable.
    """
    try:
        return ServiceSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        lines = [f"  GXPO_{'_'.join(str(p) for p in e['loc']).upper()}: {e['msg']}" for e in error.errors()]
        raise ConfigError("\n".join(["the settings of the service cannot be used:", *lines])) from None


def need_current(settings: ServiceSettings) -> None:
    """Raises ConfigError when the database is not at this version's schema."""
    from gxpo_services.migrate import is_current

    if not is_current(settings.url):
        raise ConfigError("the database is not at this version's schema; run `gxpo migrate`")


def prepare_local(settings: ServiceSettings) -> None:
    """Bring the database to the newest schema and make the local token where it is missing. Idempotent."""
    from gxpo_services.db import Database
    from gxpo_services.migrate import upgrade
    from gxpo_services.tokens.service import ensure_local_token

    make_home(settings)
    upgrade(settings.url)
    database = Database(settings.url)
    try:
        with database.writing() as session:
            ensure_local_token(session, settings.local_token_file)
    finally:
        database.close()


def make_home(settings: ServiceSettings) -> None:
    """The home, for its owner alone: it holds tokens. Raises ConfigError when it cannot be made."""
    try:
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the home {settings.home} cannot be made ({error.strerror}); check --home") from None
