"""Plan of the run in the Submit view: whether it fits, memory by phase, time and cost by rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from gxpo_client.formats import count
from gxpo_dashboard.text.labels import plain
from gxpo_dashboard.view_models import plan as view_model
from gxpo_dashboard.widgets.shown import text_table


def show(checked: Mapping[str, Any], runs: int = 1) -> None:
    """The plan in an answer of `/runs/validate`; why there is none where there is none.

    runs: of the sweep whose base configuration was checked.
    """
    plan = checked.get("plan")
    if plan is None:
        if checked.get("plan_problem"):
            st.caption(plain(f"No plan: {checked['plan_problem']}"))
        return
    if runs > 1:
        st.caption(f"Plan of one run with the base settings; the sweep has {count(runs)} runs.")
    words = plain(view_model.verdict(plan))
    if plan["fits"]:
        st.markdown(words)
    else:
        st.warning(words, icon=":material/memory:")
    text_table(_frame(view_model.time_rows(plan), view_model.TIME_COLUMNS), "Time and cost by rule")
    st.caption("With the look-ahead on to the end, without evaluation, checkpoints and start-up.")
    text_table(_frame(view_model.memory_rows(plan), view_model.MEMORY_COLUMNS), "Memory by phase", closed=True)
    st.caption(view_model.cache_words(plan))
    with st.expander("Assumptions"):
        for line in plan["assumptions"]:
            st.text(line)


def _frame(rows: Sequence[tuple[str, ...]], columns: Sequence[str]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(columns)).astype("str")
