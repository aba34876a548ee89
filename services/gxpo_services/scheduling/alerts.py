"""Alerts: what happened to runs, posted as JSON to the administrator's webhooks.

Each event is claimed once, by one of the schedulers, and then sent; a receiver that is away for longer than the retries
take misses it. The body's `text` is what chat systems show.
"""

from __future__ import annotations

import queue
import threading
import time
from urllib.parse import urlsplit

import httpx
import tenacity
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from gxpo_client.client import Json, is_loopback
from gxpo_services import logging
from gxpo_services.db.database import Database
from gxpo_services.db.tables import AlertCursor, Event, Run
from gxpo_services.run_states import RunState
from gxpo_services.scheduling import leases
from gxpo_services.settings import ServiceSettings

TIMEOUT_S = 10.0
ATTEMPTS = 4
MOST_AT_ONCE = 100
MOST_WAITING = 1_000
"""Alerts that wait for one receiver; further ones are not sent to it."""
CLOSE_S = 5.0
"""Time for the alerts that wait when the scheduler stops; a container is killed 10 s after SIGTERM."""
_OF_STATE = {RunState.FAILED: "failed", RunState.RECOVERING: "recovering", RunState.SUCCEEDED: "budget_reached"}
_WORDS: dict[str, str] = {
    "failed": "failed",
    "diverged": "diverged",
    "recovering": "is launched again",
    "no_progress": "makes no progress",
    "no_signal": "trains without signal",
    "gate_fired": "goes on without look-ahead",
    "budget_reached": "reached its budget",
}
_EVENTS = ("state", "recovery", "no_progress", "no_signal", "gate_fired")


class Alerts:
    """Sends the alerts of new events; call `send_new` in every round of a scheduler, and `close` at the end."""

    def __init__(self, database: Database, settings: ServiceSettings) -> None:
        self._database, self._settings = database, settings
        self._senders = [_Sender(webhook) for webhook in settings.webhooks]
        self._may_have_cursor = True

    def send_new(self) -> None:
        """Claim the new events, and send their alerts in the threads of the webhooks."""
        if not self._senders:
            if self._may_have_cursor:  # of earlier webhooks: later ones would get all that happened in between
                with self._database.writing() as session:
                    session.execute(delete(AlertCursor))
                self._may_have_cursor = False
            return
        with self._database.reading() as session:
            newest = session.scalar(select(func.max(Event.number))) or 0
            cursor = session.get(AlertCursor, 1)
        if cursor is None or cursor.event_number < newest:
            with self._database.writing() as session:
                leases.lock_queue(session)
                alerts = self._claim(session, newest)
            for alert in alerts:
                for sender in self._senders:
                    sender.put(alert)

    def close(self) -> None:
        """Wait until what was claimed is sent or given up, for at most CLOSE_S."""
        until = time.monotonic() + CLOSE_S
        for sender in self._senders:
            sender.put(None)
        for sender in self._senders:
            sender.join(until)

    def _claim(self, session: Session, until: int) -> list[Json]:
        """Alerts of the events up to `until` that nobody has claimed; none of the time before the first claim."""
        cursor = session.get(AlertCursor, 1)
        if cursor is None:
            session.add(AlertCursor(number=1, event_number=until))
            return []
        query = select(Event, Run).join(Run, Run.number == Event.run_number).where(Event.kind.in_(_EVENTS))
        query = query.where(Event.number > cursor.event_number, Event.number <= until).order_by(Event.number)
        rows = session.execute(query.limit(MOST_AT_ONCE)).all()
        if cursor.event_number < until:
            cursor.event_number = rows[-1][0].number if len(rows) == MOST_AT_ONCE else until
        return [alert for event, run in rows if (alert := self._alert(event, run)) is not None]

    def _alert(self, event: Event, run: Run) -> Json | None:
        """The body of a request; `time` in seconds since 1970. Trainers cannot report states and recoveries."""
        kind: str | None = "recovering" if event.kind == "recovery" else event.kind
        if kind == "state":
            kind = "diverged" if event.fields.get("reason") == "diverged" else _OF_STATE.get(event.fields["new"])
        if kind is None or kind not in (self._settings.webhook_alerts or _WORDS):
            return None
        about = {"run": run.id, "name": run.name, "url": self._settings.link_to(run.id)}
        text = f"Run {run.name!r} ({run.id}) {_WORDS[kind]}: {event.message}"
        return {"alert": kind, "text": text, "message": event.message, "time": event.time, **about}


class _Sender:
    """Posts alerts to one webhook, in a thread of its own that does not keep the process alive."""

    def __init__(self, webhook: str) -> None:
        self._webhook = webhook
        self._log = logging.get_logger(__name__).bind(host=urlsplit(webhook).hostname)  # its path is often its secret
        self._waiting: queue.Queue[Json | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)
        self._thread.start()

    def put(self, alert: Json | None) -> None:
        """Send an alert later, unless MOST_WAITING wait; None: stop after those that wait."""
        try:
            self._waiting.put_nowait(alert)
        except queue.Full:
            if alert is not None:
                self._log.error("alert not delivered", run=alert["run"], error=f"{MOST_WAITING} alerts are waiting")

    def join(self, until: float) -> None:
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._log.error("alerts not delivered before the scheduler stopped")

    def _run(self) -> None:
        while (alert := self._waiting.get()) is not None:
            try:
                _post(self._webhook, alert)
            except httpx.HTTPStatusError as error:
                self._log.error("alert not delivered", run=alert["run"], error=f"status {error.response.status_code}")
            except httpx.HTTPError as error:
                self._log.error("alert not delivered", run=alert["run"], error=type(error).__name__)


@tenacity.retry(
    retry=tenacity.retry_if_exception_type(httpx.HTTPError),
    stop=tenacity.stop_after_attempt(ATTEMPTS),
    wait=tenacity.wait_exponential(multiplier=0.5, max=8),
    reraise=True,
)
def _post(webhook: str, alert: Json) -> None:
    """Raises httpx.HTTPError when the receiver does not take it: no answer, a redirect, or a status of an error."""
    with httpx.Client(timeout=TIMEOUT_S, trust_env=not is_loopback(webhook)) as client:
        client.post(webhook, json=alert).raise_for_status()
