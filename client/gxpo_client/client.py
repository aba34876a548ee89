"""The calls of the REST API, by name."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from gxpo_client.connection import PAGE, Connection, Json, connect, parameters
from gxpo_client.errors import InvalidRequest

__all__ = ["Client", "Json", "connect"]

_MOST_ACTED_ON = 500
"""Runs that the service accepts in one request for an action on many."""
_EVENTS = 1000
"""Largest page of events."""
_DOWNLOAD_S = 600.0


class Client(Connection):
    """The API with one token. What has no method here is reached by `get`, `get_list`, `post`, `send` and `stream`."""

    def me(self) -> Json:
        """{"id", "name", "role"} of the token; never cached."""
        return self.send("GET", "/tokens/me")

    # Runs

    def runs(self, **query: Any) -> Json:
        """A page: {"items", "next_cursor", "total"}. Lists become repeated parameters; None is omitted."""
        return self.get("/runs", **query)

    def all_runs(self, *, limit: int | None = None, **filters: Any) -> list[Json]:
        """All matching runs, page by page, at most `limit`."""
        return self.all_of("/runs", limit, **filters)

    def run(self, run: str) -> Json:
        return self.get(run_path(run))

    def act(self, run: str, action: str, body: Json | None = None) -> Json:
        """`cancel`, `pause`, `resume`, `retry`, or `clone` with {"overrides": …}; returns the run."""
        return self.post(f"{run_path(run)}/{_part(action)}", body, key=secrets.token_hex(16))

    def change(self, run: str, **changes: Any) -> Json:
        """Change name, tags, notes, priority or archived."""
        return self.send("PATCH", run_path(run), json=changes)

    def act_on_all(self, runs: Sequence[str], action: str) -> list[Json]:
        """`cancel`, `pause`, `resume`, `archive`, `unarchive` or `delete`; per run {"run", "state", "problem"}."""
        parts = [list(runs[start : start + _MOST_ACTED_ON]) for start in range(0, len(runs), _MOST_ACTED_ON)]
        bodies = [{"action": action, "runs": part} for part in parts]
        return [item for body in bodies for item in self.post("/runs/actions", body)["items"]]

    def delete(self, run: str) -> None:
        self.request("DELETE", run_path(run))

    def submit(self, body: Json, key: str | None = None) -> Json:
        """Submit a run; the same `key` and body return the same run."""
        return self.post("/runs", body, key=key or secrets.token_hex(16))

    def validate(self, body: Json) -> Json:
        return self.post("/runs/validate", body)

    # Groups and sweeps

    def groups(self) -> list[Json]:
        """The newest groups."""
        return list(self.get("/groups", limit=PAGE)["items"])

    def group(self, group: str) -> Json:
        return self.get(f"/groups/{_part(group)}")

    def cancel_group(self, group: str) -> Json:
        """Cancel every run of a group that has not ended."""
        return self.post(f"/groups/{_part(group)}/cancel")

    def sweep(self, body: Json, key: str | None = None) -> Json:
        return self.post("/sweeps", body, key=key or secrets.token_hex(16))

    def validate_sweep(self, body: Json) -> Json:
        return self.post("/sweeps/validate", body)

    def study(self, body: Json, key: str | None = None) -> Json:
        return self.post("/studies", body, key=key or secrets.token_hex(16))

    # Records of a run

    def metrics(
        self, run: str, names: Sequence[str], x: str, after: int | None, max_points: int, *, joined: bool = False
    ) -> Json:
        """Metrics of a run; `joined`: with the same steps for all names, and sums."""
        query = {"names": ",".join(names), "x": x, "after": after, "max_points": max_points, "joined": joined or None}
        return self.get(f"{run_path(run)}/metrics", **query)

    def metrics_of(
        self,
        runs: Sequence[str],
        names: Sequence[str],
        x: str,
        after: int | None,
        max_points: int,
        *,
        smoothing: float = 0.0,
    ) -> dict[str, Json]:
        """Metrics of several runs, by run; smoothing: weight of an exponential average, 0 for none."""
        query = {"runs": list(runs), "names": ",".join(names), "x": x, "after": after, "max_points": max_points}
        return dict(self.get("/metrics", **query, smoothing=smoothing or None)["runs"])

    def metric_names(self, run: str) -> list[str]:
        return self.get_list(f"{run_path(run)}/metrics/names")

    def events(self, run: str, after: int = 0, limit: int = _EVENTS) -> Json:
        return self.get(f"{run_path(run)}/events", after=after, limit=limit)

    def all_events(self, run: str) -> list[Json]:
        """All events in order, page by page."""
        return self.all_of(f"{run_path(run)}/events", page_size=_EVENTS)

    def newest_events(self, run: str, most: int) -> list[Json]:
        """At most `most` events, newest first, page by page."""
        return self.all_of(f"{run_path(run)}/events", most, page_size=_EVENTS, order="desc")

    def logs(self, run: str, offset: int, limit: int = 65_536) -> Json:
        """A section of the log; a negative offset counts from its end."""
        return self.get(f"{run_path(run)}/logs", offset=offset, limit=limit)

    def timeline(self, run: str, steps: int = 4) -> list[Json]:
        """What each process did in the last steps."""
        return list(self.get(f"{run_path(run)}/timeline", steps=steps)["items"])

    def samples(self, run: str, **query: Any) -> Json:
        return self.get(f"{run_path(run)}/samples", **query)

    def evaluations(self, run: str) -> list[Json]:
        """Records without the scores of each problem."""
        return list(self.get(f"{run_path(run)}/evaluations", per_problem=False)["items"])

    def checkpoints(self, run: str) -> list[Json]:
        return list(self.get(f"{run_path(run)}/checkpoints")["items"])

    def checkpoint_zip(self, run: str, step: int) -> bytes:
        return self.request("GET", f"{run_path(run)}/checkpoints/{step}/download", timeout=_DOWNLOAD_S).content

    # Comparison and catalogue

    def compare(self, **query: Any) -> Json:
        return self.get("/compare", **query)

    def heat_map(self, group: str, **query: Any) -> Json | None:
        """Heat map of a sweep; None when it does not vary two settings."""
        try:
            return self.get(f"/groups/{_part(group)}/heatmap", **query)
        except InvalidRequest:
            return None

    def export(self, runs: Sequence[str], form: str) -> bytes:
        """A zip archive of the runs' metrics and evaluations as csv, parquet or jsonl."""
        query = parameters({"runs": list(runs), "format": form})
        return self.request("GET", "/export", params=query, timeout=_DOWNLOAD_S).content

    def schema(self) -> Json:
        return self.get("/schema")

    def presets(self) -> list[Json]:
        return self.get_list("/presets")

    def published(self) -> Json:
        return self.get("/published")

    # Tokens

    def tokens(self) -> list[Json]:
        """All tokens, page by page."""
        return self.all_of("/tokens")

    def revoke_token(self, token: str) -> Json:
        return self.send("DELETE", f"/tokens/{_part(token)}")


def run_path(run: str) -> str:
    return f"/runs/{_part(run)}"


def _part(text: str) -> str:
    """A path component; input such as `../tokens` cannot reach another path."""
    return quote(str(text), safe="").replace("..", "%2E%2E")
