"""The dashboard as a process: the product's page, or another one, served by Streamlit on loopback."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import httpx

import gxpo_dashboard
from gxpo_client.client import is_up
from gxpo_services.local.ray_head import free_port
from support.service_processes import until

APP = Path(gxpo_dashboard.__file__).with_name("server.py")


class DashboardProcess:
    """Started at once; `running` ends it.

    environment: GXPO_URL and GXPO_TOKEN_FILE, or nothing for a page of another kind. secret: of the sign-in link.
    """

    def __init__(self, log: Path, environment: Mapping[str, str] | None = None, *, page: Path | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        given = {
            "server.address": "127.0.0.1",
            "server.port": str(self.port),
            "server.headless": "true",
            "server.fileWatcherType": "none",
            "browser.gatherUsageStats": "false",
        }
        words = [f"--{name}={value}" for name, value in given.items()]
        command = [sys.executable, "-m", "streamlit", "run", str(page or APP), *words]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("GXPO_")}
        self.secret = secrets.token_urlsafe(16)
        file = log.with_suffix(".secret")
        file.write_text(self.secret, encoding="utf-8")
        clean["GXPO_LINK_SECRET_FILE"] = str(file)
        with log.open("ab") as out:
            self._process = subprocess.Popen(command, env={**clean, **(environment or {})}, stdout=out, stderr=out)

    @property
    def cookie(self) -> dict[str, str]:
        """The cookie of a browser that has followed the sign-in link; a new session each time."""
        answer = httpx.get(self.url, params={"secret": self.secret}, trust_env=False)
        ((name, value),) = answer.cookies.items()
        return {"name": name, "value": value, "url": self.url}

    @property
    def pid(self) -> int:
        return self._process.pid

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Until the block ends; it begins when the dashboard answers."""
        try:
            until(self._answers, "the dashboard to answer")
            yield self
        finally:
            self._process.terminate()
            self._process.wait(30)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the dashboard has ended; see its log"
        return is_up(f"{self.url}/_stcore/health", 5.0)
