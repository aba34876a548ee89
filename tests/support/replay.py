"""A real service with recorded runs in it: submitted over REST, and reported through the ingest call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from gxpo_services.app import create_app
from gxpo_services.auth import tokens
from gxpo_services.auth.tokens import RoleWord, TokenRequest
from gxpo_services.db.database import Database
from gxpo_services.db.migrate import upgrade
from gxpo_services.local.ray_head import free_port
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.jsonl import read_lines
from support import reporting
from support.http_server import HttpServer
from support.reported_runs import finish

Json = dict[str, Any]
_ROWS = 150
"""Rows of a kind in one call."""


class Recording:
    """A run's folder as a trainer left it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.identity: Json = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        self.rows = {kind: list(read_lines(folder / f"{kind}.jsonl")) for kind in reporting.KINDS}

    @property
    def last_step(self) -> int:
        return max(row["step"] for row in self.rows["metrics"])

    def between(self, kind: str, after: int, upto: int) -> list[Json]:
        """Rows of steps in (after, upto]; events have no step and come with the first part."""
        rows = self.rows[kind]
        if kind == "events":
            return rows if after < 0 else []
        return [row for row in rows if after < row["step"] <= upto]


class LiveRun:
    """A run that is being reported, up to the last call of `report`."""

    def __init__(self, service: ReplayedService, recording: Recording, launched: str) -> None:
        self.id, self._service, self._recording, self._launched = launched.split()[0], service, recording, launched
        self._batch, self._step, self._sent = 0, -1, dict.fromkeys(reporting.KINDS, 0)

    def report(self, upto: int | None = None) -> None:
        """Report everything up to a step, the whole recording by default."""
        upto = self._recording.last_step if upto is None else upto
        rows = {kind: self._recording.between(kind, self._step, upto) for kind in reporting.KINDS}
        while any(rows.values()) or self._batch == 0:
            part = {kind: remaining[:_ROWS] for kind, remaining in rows.items()}
            identity = self._recording.identity if self._batch == 0 else None
            self._send(offsets=dict(self._sent), identity=identity, **part)
            for kind, sent in part.items():
                self._sent[kind] += len(sent)
                rows[kind] = rows[kind][_ROWS:]
        self._step = upto

    def end(self, outcome: str = "succeeded", **fields: Any) -> None:
        """Say how it ended."""
        ended = {"attempt": 1, "outcome": outcome, "ended_by": None, "reason": None, "message": "", "time": 0.0}
        self._send(offsets=dict(self._sent), outcome=ended | fields)

    def _send(self, **parts: Any) -> None:
        self._batch += 1
        self._service.ingest(self._launched, reporting.body(self._batch, **parts))


class ServedHome:
    """The API on a home's database, in a thread of this process; it can be stopped and restarted."""

    def __init__(self, home: Path, port: int | None = None) -> None:
        self.settings = ServiceSettings(home=home, port=port or free_port())
        self.url = f"http://127.0.0.1:{self.settings.port}"
        self.start()

    def start(self) -> None:
        # Not the minute that a dashboard's connection to the stream of events outlasts its last page.
        self._server = HttpServer(create_app(self.settings), port=self.settings.port, grace_s=5)
        self._server.__enter__()

    def stop(self) -> None:
        self._server.__exit__()


class ReplayedService(ServedHome):
    """The same on a database of its own, SQLite in `home`, and with a hand in it."""

    def __init__(self, home: Path, port: int | None = None) -> None:
        home.mkdir(parents=True, exist_ok=True)
        url = ServiceSettings(home=home).url
        upgrade(url)
        self._database = Database(url)
        super().__init__(home, port)
        headers = {"Authorization": f"Bearer {self.token('admin')}"}
        self.http = httpx.Client(base_url=f"{self.url}/api/v1", headers=headers, timeout=60, trust_env=False)

    def close(self) -> None:
        self.stop()
        self.http.close()
        self._database.close()

    def token(self, role: RoleWord) -> str:
        with self._database.writing() as session:
            return tokens.create(session, TokenRequest(name=role, role=role), actor="tests").token

    def submit(self, config: Json, **fields: Any) -> str:
        """A run that waits; its id."""
        answer = self.http.post("/runs", json={"config": config, **fields})
        answer.raise_for_status()
        return str(answer.json()["id"])

    def launch(self, folder: Path, run: str | None = None, **fields: Any) -> LiveRun:
        """A run with the config of a recording (or an existing one), launched and silent so far."""
        recording = Recording(folder)
        run = run or self.submit(recording.identity["config"], **fields)
        return LiveRun(self, recording, reporting.launch(self._database, run))

    def finish(self, run: str, accuracies: list[float]) -> None:
        """Bring a submitted run to its end, with evaluations of these accuracies."""
        finish(self._database, run, accuracies)

    def report(self, run: str, **rows: list[Json]) -> None:
        """Launch a run and report rows of these kinds, once."""
        self.ingest(reporting.launch(self._database, run), reporting.body(1, **rows))

    def ingest(self, launched: str, content: Json) -> None:
        """A call of the trainer of a launched run."""
        run, secret = launched.split()
        headers = {"Authorization": f"Bearer {secret}"}
        self.http.post(f"/runs/{run}/ingest", json=content, headers=headers).raise_for_status()

    def replay(self, folder: Path, **fields: Any) -> str:
        """A recorded run, reported whole and ended; its id."""
        live = self.launch(folder, **fields)
        live.report()
        live.end(ended_by="steps")
        return live.id
