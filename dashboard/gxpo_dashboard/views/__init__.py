"""The five views, each a page of its own."""

from __future__ import annotations

from typing import Any

import streamlit as st

from gxpo_dashboard.views import benchmarks, compare, run, runs, submit


def pages() -> dict[str, Any]:
    """The pages by name, in the order of the navigation; kept in the session so that views can lead to each other."""
    found = {
        "runs": st.Page(runs.show, title="Runs", icon=":material/list:", url_path="runs", default=True),
        "run": st.Page(run.show, title="Run", icon=":material/monitoring:", url_path="run"),
        "compare": st.Page(compare.show, title="Compare", icon=":material/compare_arrows:", url_path="compare"),
        "benchmarks": st.Page(
            benchmarks.show, title="Benchmarks", icon=":material/leaderboard:", url_path="benchmarks"
        ),
        "submit": st.Page(submit.show, title="Submit", icon=":material/add_circle:", url_path="submit"),
    }
    st.session_state["pages"] = found
    return found
