"""`gxpo up`: run and supervise API, scheduler, Ray and dashboard on this machine, on loopback."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from gxpo_client.client import is_up
from gxpo_services.auth.tokens import prepare_local
from gxpo_services.cli.common import STATE_FILE, say
from gxpo_services.local.ray_head import RayHead, free_port
from gxpo_services.local.supervisor import Child, Supervisor, stop_orphans
from gxpo_services.scheduling.scheduler import LIVENESS_FILE, is_alive
from gxpo_services.settings import make_home, read_settings
from gxpo_trainer.errors import ConfigError, GxpoError
from gxpo_trainer.jsonl import replace_file

LOCK_FILE = "up.lock"
LINK_SECRET_FILE = "dashboard-secret"
"""The secret of the dashboard's link, new at each start: on a shared machine every account reaches loopback."""
_ROUND_S = 0.5
_PROBE_S = 5.0
_GXPO = (sys.executable, "-m", "gxpo_trainer.cli")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stack:
    """All processes of a service on one machine. Entering starts them and waits for readiness; leaving stops them.

    Order: lock of the home, orphans of a killed start, database and token, API and Ray together, the scheduler, which
    needs both, the dashboard. They stop in reverse: no scheduler launches again what ends with Ray, whose trainers save
    checkpoints and report to the API. say: prints a message. Tests override `ray_head` and `scheduler`.
    """

    def __init__(
        self,
        home: Path | None,
        say: Callable[[str], None],
        until: threading.Event,
        *,
        port: int | None = None,
        dashboard_port: int | None = 8501,
    ) -> None:
        """dashboard_port: None for no dashboard."""
        self.settings = read_settings(home=home, port=port)
        if not self.settings.is_loopback:
            raise ConfigError(
                f"GXPO_HOST = {self.settings.host}: `gxpo up` serves only this machine; use `gxpo serve` and "
                "`gxpo scheduler` behind a proxy for others"
            )
        self._say, self._until = say, until
        self._port, self._dashboard_port = self.settings.port, dashboard_port
        self._supervisor: Supervisor | None = None
        self.dashboard_url: str | None = None

    def __enter__(self) -> Self:
        make_home(self.settings)
        self.home = self.settings.home.resolve()
        self._lock = FileLock(self.home / LOCK_FILE, blocking=False)
        try:
            self._lock.acquire()
            self._start()
        except Timeout:
            raise GxpoError(f"{self.home} is in use by another `gxpo up`; use it or choose another --home") from None
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError):
                raise GxpoError(f"cannot start in {self.home}: {error}") from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything, ignoring signals: a second Ctrl-C must not leave orphans."""
        earlier = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
        try:
            if self._supervisor is not None:
                self._say("stopping …")
                self._supervisor.stop()
                self._supervisor = None
        finally:
            self._lock.release()
            for number, handler in earlier.items():
                signal.signal(number, handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def check(self) -> None:
        if self._supervisor is not None:
            self._supervisor.check()

    def ray_head(self) -> RayHead | None:
        """The Ray head to start; None when the settings name an external one."""
        return RayHead(self.home) if "ray_address" not in self.settings.model_fields_set else None

    def scheduler(self, env: dict[str, str]) -> Child:
        return Child("scheduler", [*_GXPO, "scheduler"], lambda: is_alive(self.home), env)

    def _start(self) -> None:
        stop_orphans(self.home / STATE_FILE, self._say)
        self._port = self._next_free("api", self._port)
        if self._dashboard_port is not None:
            self._dashboard_port = self._next_free("dashboard", self._dashboard_port)
            self.dashboard_url = f"http://127.0.0.1:{self._dashboard_port}"
        prepare_local(self.settings)
        self._say("database: ready")
        ray = self.ray_head()
        about = {"url": self.url, "dashboard": self.dashboard_url, "ray": ray.address if ray else None}
        supervisor = Supervisor(self.home / STATE_FILE, self.home / "logs", self._say, self._until, about)
        supervisor.adopt_orphans()
        self._supervisor = supervisor
        env = {
            "GXPO_HOME": str(self.home),
            "GXPO_HOST": "127.0.0.1",
            "GXPO_PORT": str(self._port),
            "GXPO_URL": self.url,
            "GXPO_TOKEN_FILE": str(self.settings.local_token_file),
            "PYTHONUNBUFFERED": "1",
        } | ({"GXPO_RAY_ADDRESS": ray.address, **ray.env} if ray else {})
        api = Child(
            "api", [*_GXPO, "serve"], partial(is_up, f"{self.url}/health/ready", _PROBE_S), env, port=self._port
        )
        supervisor.start(api, *([ray.child(self.settings.stop_wait_s)] if ray else []))
        (self.home / LIVENESS_FILE).unlink(missing_ok=True)  # of an earlier scheduler
        supervisor.start(self.scheduler(env))
        if self.dashboard_url is not None:
            replace_file(self.home / LINK_SECRET_FILE, secrets.token_urlsafe(32), 0o600)
            supervisor.start(self._dashboard({**env, "GXPO_LINK_SECRET_FILE": str(self.home / LINK_SECRET_FILE)}))

    def _next_free(self, name: str, wanted: int) -> int:
        port = free_port(wanted)
        if port != wanted:
            self._say(f"{name}: port {wanted} is in use; using {port}")
        return port

    @property
    def link(self) -> str | None:
        """Link that signs its visitor in to the dashboard; None without a dashboard."""
        if self.dashboard_url is None:
            return None
        return f"{self.dashboard_url}/?secret={(self.home / LINK_SECRET_FILE).read_text(encoding='utf-8')}"

    def _dashboard(self, env: dict[str, str]) -> Child:
        options = {
            "server.address": "127.0.0.1",
            "server.port": self._dashboard_port,
            "server.headless": "true",
            "server.fileWatcherType": "none",
            "browser.gatherUsageStats": "false",
            "browser.serverAddress": "127.0.0.1",
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "streamlit", "run", str(files("gxpo_dashboard") / "server.py"), *words]
        ready = partial(is_up, f"{self.dashboard_url}/_stcore/health", _PROBE_S)
        return Child("dashboard", command, ready, env, port=self._dashboard_port)


def up(args: argparse.Namespace) -> int:
    """Run until Ctrl-C or SIGTERM; exit code 0 after a clean shutdown."""
    until = stop_on_signals()
    dashboard_port = None if args.no_dashboard else args.dashboard_port
    with Stack(
        args.home, lambda text: say(f"up: {text}"), until, port=args.port, dashboard_port=dashboard_port
    ) as stack:
        if stack.link is not None:
            print(f"Dashboard  {stack.link}")
        print(f"API        {stack.url}/api/v1/docs\nToken      {stack.settings.local_token_file}")
        print(f"Logs       {stack.home / 'logs'}")
        print("Press Ctrl-C to stop.", flush=True)
        while not until.wait(_ROUND_S):
            stack.check()
    say("up: stopped; executing runs resume from their checkpoints at the next `gxpo up`")
    return 0


def stop_on_signals() -> threading.Event:
    until = threading.Event()
    for number in _SIGNALS:
        signal.signal(number, lambda *_: until.set())
    return until
