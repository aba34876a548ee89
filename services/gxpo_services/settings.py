"""Settings of the service, from the environment (`GXPO_…`) or from arguments; validated once, at start-up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_origin

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gxpo_client.client import is_http, is_loopback, is_loopback_host
from gxpo_trainer.config.base import STOP_WAIT_S
from gxpo_trainer.config.messages import phrase
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner.devices import device_named
from gxpo_trainer.plugins import ALLOWLIST, ALLOWLIST_OF_KIND

AlertKind = Literal["failed", "diverged", "recovering", "no_progress", "no_signal", "gate_fired", "budget_reached"]


class ServiceSettings(BaseSettings):
    """Every setting of API and scheduler. Both read the same environment, so they agree."""

    # env_ignore_empty: docker-compose.yml passes settings that are not given as empty variables. enable_decoding: lists
    # are decoded below, where one that is not JSON is an error of its field.
    model_config = SettingsConfigDict(
        env_prefix="GXPO_", env_ignore_empty=True, enable_decoding=False, extra="ignore", frozen=True
    )

    home: Path = Field(Path("gxpo-home"), description="Folder for the database, artifacts and local token.")
    database_url: str | None = Field(None, description="SQLAlchemy URL; default: SQLite in `home`.")
    database_password_file: Path | None = Field(None, description="File that contains the database password.")
    database_timeout_s: float = Field(15.0, ge=1, description="Time in which PostgreSQL must answer; then 503.")
    artifact_root: Path | None = Field(None, description="Parent of the run folders; default: `home`/artifacts.")
    host: str = Field("127.0.0.1", description="Address that the API listens on.")
    port: int = Field(8000, ge=1, le=65535, description="Port of the API.")
    public_url: str | None = Field(None, description="URL at which trainers reach the API; default: host and port.")
    dashboard_url: str | None = Field(None, description="URL of the dashboard, for the links of alerts.")

    ray_address: str = Field("http://127.0.0.1:8265", description="Ray's job server.")
    max_concurrent_runs: int = Field(1, ge=1, description="Maximum number of executing runs.")
    max_runs_per_user: int | None = Field(None, ge=1, description="Most executing runs per token; default: no limit.")
    max_queued_per_user: int = Field(1000, ge=1, description="Maximum number of queued runs per token.")
    quota_cpus: float | None = Field(None, gt=0, description="Logical CPUs for all runs; default: all that Ray has.")
    quota_gpus: float | None = Field(None, ge=0, description="GPUs for all runs; default: all that Ray has.")
    gpu: str | None = Field(None, description="The cluster's GPUs (docs/planner.md): runs that cannot fit are refused.")

    tick_s: float = Field(1.0, gt=0, description="Interval between scheduler rounds.")
    lease_s: float = Field(30.0, gt=0, description="Duration of a scheduler's lease on a run.")
    heartbeat_s: float = Field(120.0, gt=0, description="Time without a heartbeat after which a run is recovered.")
    start_s: float = Field(900.0, gt=0, description="Maximum time from launch to the first heartbeat.")
    cancel_grace_s: float = Field(60.0, gt=0, description="Time to stop at the end of a step before the job is killed.")
    pause_grace_s: float = Field(900.0, gt=0, description="The same for a pause, including the checkpoint.")
    stop_wait_s: int = Field(STOP_WAIT_S, ge=1, description="Time from SIGTERM to a run's end, for its checkpoint.")
    max_recoveries: int = Field(3, ge=0, description="Consecutive recoveries of a run without progress.")
    max_forgotten: int = Field(5, ge=0, description="Consecutive jobs that Ray may lose without progress of the run.")
    idempotency_s: float = Field(604800.0, gt=0, description="Retention of idempotency keys (7 days).")

    retention_days: float | None = Field(None, gt=0, description="Days to keep samples and log of an ended run.")
    webhooks: tuple[str, ...] = Field((), description="URLs that alerts are posted to as JSON.")
    webhook_alerts: tuple[AlertKind, ...] = Field((), description="Alerts to send; default: all.")

    model_roots: tuple[Path, ...] = Field((), description="Folders allowed for model.path; default: any.")
    data_roots: tuple[Path, ...] = Field((), description="Folders allowed for data files; default: any.")
    allow_hub: bool = Field(True, description="Allow hub names for models and data sets.")
    allow_remote_code: bool = Field(False, description="Allow model.trust_remote_code.")
    allowed_plugins: tuple[str, ...] = Field(
        (), description="Custom components: names of entry points, or module:Class; `*` is every entry point."
    )
    allowed_rewards: tuple[str, ...] = Field((), description="Custom rewards (module:Class) that a config may use too.")
    allowed_reward_urls: tuple[str, ...] = Field((), description="Addresses of rewards, as configs write them.")
    allowed_environments: tuple[str, ...] = Field((), description="Environments (module:Class) that configs may use.")
    allowed_environment_urls: tuple[str, ...] = Field((), description="The same of OpenEnv servers and running agents.")
    allowed_tracker_urls: tuple[str, ...] = Field((), description="The same of trackers, which get the keys.")

    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="Largest request body.")
    max_head_s: float = Field(10.0, gt=0, description="Time in which the head of a request must arrive.")
    max_body_s: float = Field(60.0, gt=0, description="Time in which a request body must arrive.")
    log_json: bool = Field(False, description="Log one JSON object per line instead of text.")

    @field_validator("*", mode="before")
    @classmethod
    def _json_list(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str) or get_origin(cls.model_fields[str(info.field_name)].annotation) is not tuple:
            return value
        try:
            decoded = json.loads(value)
        except ValueError:
            decoded = None
        if not isinstance(decoded, list):
            raise ValueError(f'{value!r} must be a JSON list such as ["a", "b"]')
        return decoded

    @field_validator("lease_s", "heartbeat_s")
    @classmethod
    def _several_rounds(cls, value: float, info: ValidationInfo) -> float:
        # A longer interval would count as an outage in each round, so that no time-out would ever end.
        rounds, tick_s = 3 if info.field_name == "lease_s" else 4, info.data.get("tick_s", 0.0)
        if tick_s > value / rounds:
            raise ValueError(f"is {value:g} and must be at least {rounds} times GXPO_TICK_S = {tick_s:g}")
        return value

    @field_validator("ray_address", "public_url", "dashboard_url", "webhooks")
    @classmethod
    def _http(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for url in value if isinstance(value, tuple) else [value]:
            if url is not None and not is_http(url):
                raise ValueError(f"{url!r} must look like http://host:port")
        return value.rstrip("/") if isinstance(value, str) else value  # a webhook's path is not ours

    @field_validator("gpu")
    @classmethod
    def _known_gpu(cls, value: str | None) -> str | None:
        try:
            return value and device_named(value).name
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @field_validator("database_url")
    @classmethod
    def _known_database(cls, value: str | None) -> str | None:
        kind, _, driver = (value or "sqlite://").partition("://")[0].partition("+")
        if driver not in {"sqlite": ("", "pysqlite"), "postgresql": ("", "psycopg")}.get(kind, ()):
            raise ValueError("must begin with sqlite:/// or postgresql+psycopg://")  # the rest may hold a password
        return value

    @field_validator("model_roots", "data_roots")
    @classmethod
    def _absolute(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(path.expanduser().resolve() for path in value)

    @field_validator(
        "allowed_plugins", "allowed_rewards", "allowed_environments", "allowed_reward_urls", "allowed_environment_urls"
    )
    @classmethod
    def _without_comma(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            if "," in entry:  # trainers get each list with its entries separated by commas
                fix = "start the command from a script, or write %2C in an address"
                raise ValueError(f"{entry!r} has a comma, which separates the entries for trainers; {fix}")
        return value

    @property
    def allowlists(self) -> dict[str, str]:
        """Environment variables that keep a process from importing custom components that are not listed here
        (gxpo_trainer/plugins.py)."""
        return {
            ALLOWLIST: ",".join(self.allowed_plugins),
            ALLOWLIST_OF_KIND["rewards"]: ",".join(self.allowed_rewards),
            ALLOWLIST_OF_KIND["environments"]: ",".join(self.allowed_environments),
        }

    @property
    def url(self) -> str:
        """SQLAlchemy URL of the database, including the password from its file. Raises ConfigError."""
        if self.database_url is None:
            return f"sqlite:///{self.home.resolve() / 'gxpo.sqlite'}"
        if self.database_password_file is None:
            return self.database_url
        from sqlalchemy import make_url

        try:
            password = self.database_password_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(
                f"cannot read the database password from {self.database_password_file} ({error.strerror}); "
                "check GXPO_DATABASE_PASSWORD_FILE"
            ) from None
        return make_url(self.database_url).set(password=password).render_as_string(hide_password=False)

    @property
    def artifacts(self) -> Path:
        return (self.artifact_root or self.home / "artifacts").resolve()

    @property
    def local_token_file(self) -> Path:
        """The token created at the first start on one machine; readable only by its owner."""
        return self.home.resolve() / "token"

    @property
    def api_url(self) -> str:
        """URL at which trainers and commands on this machine reach the API."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.public_url or f"http://{host}:{self.port}"

    def link_to(self, run_id: str) -> str:
        """URL of a run for people: its page of the dashboard, or the API's JSON if its address is unknown."""
        if self.dashboard_url is None:
            return f"{self.api_url}/api/v1/runs/{run_id}"
        return f"{self.dashboard_url}/?view=run&run={run_id}"

    @property
    def is_loopback(self) -> bool:
        return is_loopback_host(self.host)


def need_roots(settings: ServiceSettings) -> None:
    """Raise ConfigError when others can reach the service, and their configs could name any file of this machine."""
    if settings.is_loopback and (settings.public_url is None or is_loopback(settings.public_url)):
        return
    missing = [f"GXPO_{name.upper()}" for name in ("model_roots", "data_roots") if not getattr(settings, name)]
    if missing:
        where = settings.public_url if settings.is_loopback else settings.host
        raise ConfigError(
            f"the service is reachable at {where}, so configs must be limited to folders; set {' and '.join(missing)}, "
            """for example GXPO_MODEL_ROOTS='["/models"]'"""
        )


def read_settings(**given: Any) -> ServiceSettings:
    """Settings from the environment, overridden by `given`.

    Raises ConfigError that names each invalid one by its variable.
    """
    try:
        return ServiceSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        lines = [f"  GXPO_{'_'.join(str(p) for p in e['loc']).upper()}: {phrase(e)}" for e in error.errors()]
        raise ConfigError("\n".join(["invalid service settings:", *lines])) from None


def make_home(settings: ServiceSettings) -> None:
    """Create the home with mode 0700, or make it so: it holds tokens and the database.

    Raises ConfigError, also for a folder with other files that others may use.
    """
    home = settings.home
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if home.stat().st_mode & 0o077:
            names = {entry.name for entry in home.iterdir()}
            if settings.artifacts.parent == home.resolve():
                names.discard(settings.artifacts.name)  # of an API that came first
            if names and names.isdisjoint(("gxpo.sqlite", "token", "scheduler-round", "up.lock")):  # not a gxpo home
                fix = f"choose an empty folder, or run `chmod 700 {home}`"
                raise ConfigError(f"GXPO_HOME = {home} is open to other accounts and holds other files; {fix}")
            home.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"cannot create the home {home} ({error.strerror}); check --home") from None
