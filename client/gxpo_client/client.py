"""The calls of the REST API that have a name; the others are made by path."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from gxpo_client.connection import Connection, Json, connect, parameters
from gxpo_client.errors import InvalidRequest

__all__ = ["Client", "Json", "connect"]

_MOST_ACTED_ON = 500
_DOWNLOAD_S = 600.0


class Client(Connection):
    """The API with one token.

    What has no method here is reached by its path: `get("/runs", run, "timeline", steps=4)`. The first part is the path
    of a collection, the others are quoted: a part such as `../tokens` cannot reach another path.
    """

    def run(self, run: str) -> Json:
        return self.get("/runs", run)

    def act(self, run: str, action: str, body: Json | None = None) -> Json:
        """`cancel`, `pause`, `resume`, `retry`, or `clone` with {"overrides": …}; returns the run."""
        return self.post("/runs", run, action, body=body, key=secrets.token_hex(16))

    def change(self, run: str, **changes: Any) -> Json:
        """Change name, tags, notes, priority or archived."""
        return self.send("PATCH", "/runs", run, json=changes)

    def act_on_all(self, runs: Sequence[str], action: str) -> list[Json]:
        """`cancel`, `pause`, `resume`, `archive`, `unarchive` or `delete`; per run {"run", "state", "problem"}."""
        parts = [list(runs[start : start + _MOST_ACTED_ON]) for start in range(0, len(runs), _MOST_ACTED_ON)]
        bodies = [{"action": action, "runs": part} for part in parts]
        return [item for body in bodies for item in self.post("/runs/actions", body=body)["items"]]

    def submit(self, body: Json, key: str | None = None, *, to: str = "/runs") -> Json:
        """Submit a run, a sweep (to="/sweeps") or a study ("/studies"); the same `key` and body submit it once."""
        return self.post(to, body=body, key=key or secrets.token_hex(16))

    def metrics(self, run: str, names: Sequence[str], x: str, after: int | None, max_points: int, **more: Any) -> Json:
        """Metrics of a run. more: `from` and `to`, the ends of a part of the axis; `smoothing`, the weight of an
        exponential average; `joined`, with the same steps for all names, and sums."""
        query = {"names": ",".join(names), "x": x, "after": after, "max_points": max_points, **more}
        return self.get("/runs", run, "metrics", **query)

    def metrics_of(
        self, runs: Sequence[str], names: Sequence[str], x: str, after: int | None, max_points: int, **more: Any
    ) -> dict[str, Json]:
        """The same of several runs, by run."""
        query = {"runs": list(runs), "names": ",".join(names), "x": x, "after": after, "max_points": max_points}
        return dict(self.get("/metrics", **query, **more)["runs"])

    def metric_names(self, run: str) -> list[str]:
        return self.get_list("/runs", run, "metrics", "names")

    def evaluations(self, run: str) -> list[Json]:
        """Records without the scores of each problem."""
        return list(self.get("/runs", run, "evaluations", per_problem=False)["items"])

    def checkpoint_zip(self, run: str, step: int) -> bytes:
        return self.request("GET", "/runs", run, "checkpoints", str(step), "download", timeout=_DOWNLOAD_S).content

    def heat_map(self, group: str, **query: Any) -> Json | None:
        """Heat map of a sweep; None when it does not vary two settings."""
        try:
            return self.get("/groups", group, "heatmap", **query)
        except InvalidRequest:
            return None

    def export(self, runs: Sequence[str], form: str) -> bytes:
        """A zip archive of the runs' metrics and evaluations as csv or jsonl."""
        query = parameters({"runs": list(runs), "format": form})
        return self.request("GET", "/export", params=query, timeout=_DOWNLOAD_S).content
