"""Settings of the service, from the environment (`GXPO_…`) or from arguments; checked once, at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gxpo_services.network.addresses import is_http
from gxpo_trainer.errors import ConfigError


class ServiceSettings(BaseSettings):
    """Every setting of API and scheduler. Both read the same environment, so they agree."""

    model_config = SettingsConfigDict(env_prefix="GXPO_", extra="ignore", frozen=True)

    home: Path = Field(Path("gxpo-home"), description="Folder of database, artifacts and local token.")
    database_url: str | None = Field(None, description="SQLAlchemy URL; none: SQLite in `home`.")
    database_password_file: Path | None = Field(None, description="File whose content is the database's password.")
    artifact_root: Path | None = Field(None, description="Where runs' folders are made; none: `home`/artifacts.")
    host: str = Field("127.0.0.1", description="Address that the API listens on.")
    port: int = Field(8000, ge=1, le=65535, description="Port of the API.")
    public_url: str | None = Field(None, description="URL under which trainers reach the API; none: host and port.")

    ray_address: str = Field("http://127.0.0.1:8265", description="Ray's jobs endpoint.")
    max_concurrent_runs: int = Field(1, ge=1, description="Runs that execute at the same time, all users together.")
    max_runs_per_user: int | None = Field(None, ge=1, description="Of those, at most so many of one token; none: all.")
    quota_cpus: float | None = Field(None, gt=0, description="Logical CPUs of all executing runs; none: all of Ray's.")
    quota_gpus: float | None = Field(None, ge=0, description="GPUs of all executing runs; none: all of Ray's.")

    tick_s: float = Field(1.0, gt=0, description="Pause between two rounds of the scheduler.")
    lease_s: float = Field(30.0, gt=0, description="A scheduler that is silent for so long has lost its runs.")
    heartbeat_s: float = Field(120.0, gt=0, description="A run whose trainer is silent for so long is recovered.")
    start_s: float = Field(900.0, gt=0, description="Longest wait for a launched run's first word.")
    cancel_grace_s: float = Field(60.0, gt=0, description="Time to stop at a step's end before the job is ended.")
    pause_grace_s: float = Field(900.0, gt=0, description="The same for a pause, which writes a checkpoint.")
    max_recoveries: int = Field(3, ge=0, description="Recoveries of a run before it fails.")
    max_forgotten: int = Field(5, ge=0, description="Jobs in a row that Ray may lose without a new step of their run.")
    idempotency_s: float = Field(604800.0, gt=0, description="Idempotency keys are kept for so long (7 days).")

    model_roots: tuple[Path, ...] = Field((), description="Folders that model.path may lie in; none named: any.")
    data_roots: tuple[Path, ...] = Field((), description="Folders that data files may lie in; none named: any.")
    allow_hub: bool = Field(True, description="Models and data sets may be hub names.")
    allow_remote_code: bool = Field(False, description="model.trust_remote_code may be true.")
    allowed_rewards: tuple[str, ...] = Field((), description="Custom reward classes (module:Class) a config may name.")

    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="Largest request body.")
    log_json: bool = Field(False, description="Log one JSON object a line; false: text for people.")

    @field_validator("ray_address", "public_url")
    @classmethod
    def _http(cls, value: str | None) -> str | None:
        if value is not None and not is_http(value):
            raise ValueError(f"{value!r} must look like http://host:port")
        return value

    @field_validator("model_roots", "data_roots")
    @classmethod
    def _absolute(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(path.expanduser().resolve() for path in value)

    @property
    def url(self) -> str:
        """SQLAlchemy URL of the database, the password from its file put in."""
        if self.database_url is None:
            return f"sqlite:///{self.home.resolve() / 'gxpo.sqlite'}"
        if self.database_password_file is None:
            return self.database_url
        from sqlalchemy import make_url

        password = self.database_password_file.read_text(encoding="utf-8").strip()
        return make_url(self.database_url).set(password=password).render_as_string(hide_password=False)

    @property
    def artifacts(self) -> Path:
        return (self.artifact_root or self.home / "artifacts").resolve()

    @property
    def local_token_file(self) -> Path:
        """The token that a first start on one machine makes; readable by its owner alone."""
        return self.home.resolve() / "token"

    @property
    def api_url(self) -> str:
        """Where trainers and commands on this machine reach the API."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.public_url or f"http://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return self.host in ("127.0.0.1", "::1", "localhost")


def read_settings(**given: Any) -> ServiceSettings:
    """The settings of the environment with those that are given over them.

    Raises ConfigError that names each bad one by its variable.
    """
    try:
        return ServiceSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        lines = [f"  GXPO_{'_'.join(str(p) for p in e['loc']).upper()}: {e['msg']}" for e in error.errors()]
        raise ConfigError("\n".join(["the settings of the service cannot be used:", *lines])) from None


def make_home(settings: ServiceSettings) -> None:
    """The home, for its owner alone: it holds tokens. Raises ConfigError when it cannot be made."""
    try:
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the home {settings.home} cannot be made ({error.strerror}); check --home") from None
