"""The dashboard's script on a real service, without a browser: each page is a session of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from streamlit.testing.v1 import AppTest

import gxpo_dashboard
from support.replay import ReplayedService

PAGE = Path(gxpo_dashboard.__file__).with_name("app.py")
WAIT_S = 120.0


class Pages:
    """Pages of the dashboard with an entered token. No run of the service starts, since there is no scheduler."""

    def __init__(self, service: ReplayedService) -> None:
        self.service = service
        self.http = service.http
        self.token = service.token("admin")

    def start_comparisons(self) -> None:
        """Start the process in which the service compares, before a page replaces the main module, which it imports."""
        self.http.get("/compare", params={"runs": "r01none0000000000000"})

    def open(self, view: str, state: Mapping[str, Any] | None = None, **query: Any) -> AppTest:
        """A view with its parameters. state: of the session before its first run."""
        page = AppTest.from_file(str(PAGE), default_timeout=WAIT_S)
        for name, value in {"token": self.token, **(state or {})}.items():
            page.session_state[name] = value
        for name, value in {"view": view, **query}.items():
            page.query_params[name] = value
        return page.run()

    def reload(self, page: AppTest) -> AppTest:
        """The same address in a new session."""
        query = dict(page.query_params)
        return self.open(str(query.pop("view")), **query)

    def submit(self, name: str, *overrides: str, token: str | None = None, **fields: Any) -> str:
        """A queued run of the demo; its id. token: of the submitter, the admin's by default."""
        body = {"preset": "demo", "name": name, "overrides": list(overrides), **fields}
        headers = {"Authorization": f"Bearer {token or self.token}"}
        return str(self.http.post("/runs", json=body, headers=headers).raise_for_status().json()["id"])

    def cancel(self, run: str) -> None:
        self.http.post(f"/runs/{run}/cancel").raise_for_status()

    def state(self, run: str) -> str:
        """State of a run; `deleted` if there is none."""
        answer = self.http.get(f"/runs/{run}")
        return "deleted" if answer.status_code == HTTPStatus.NOT_FOUND else str(answer.json()["state"])


def labelled(elements: Any, label: str) -> Any:
    """The element with this label."""
    return next(element for element in elements if element.label == label)


def table_columns(page: AppTest) -> dict[str, list[Any]]:
    """The page's table of rows as the browser gets it: column → its cells."""
    # The crosshair is a component without data.
    (table,) = [json.loads(part.proto.json) for part in page.get("bidi_component") if part.proto.json]
    names = [column["name"] for column in table["columns"]]
    cells = [row["cells"] for row in table["rows"]]
    return dict(zip(names, map(list, zip(*cells, strict=True)), strict=True))
