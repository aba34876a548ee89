"""The five views."""

from __future__ import annotations

from collections.abc import Callable

from gxpo_dashboard.views import benchmarks, compare, run, runs, submit

VIEWS: dict[str, tuple[str, str, Callable[[], None]]] = {
    "runs": ("Runs", ":material/list:", runs.show),
    "run": ("Run", ":material/monitoring:", run.show),
    "compare": ("Compare", ":material/compare_arrows:", compare.show),
    "benchmarks": ("Benchmarks", ":material/leaderboard:", benchmarks.show),
    "submit": ("Submit", ":material/add_circle:", submit.show),
}
"""Name in the URL → title, icon and function."""
