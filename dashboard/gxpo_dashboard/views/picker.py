"""Selection of runs by name; the URL contains their ids."""

from __future__ import annotations

from typing import Any

import streamlit as st

from gxpo_client.errors import Refused
from gxpo_client.formats import count
from gxpo_dashboard.session import permalinks, visitor
from gxpo_dashboard.text.labels import unique_labels

Json = dict[str, Any]
_RECENT = 100


def runs(label: str, name: str, *, most: int, default: tuple[str, ...] = ()) -> dict[str, Json]:
    """The selected runs by id, in order. Options: recent runs, search results and selected runs."""
    asked = st.query_params.get_all(name)
    if len(asked) > most:
        st.query_params[name] = asked[:most]  # Streamlit raises an error for more values than a widget allows
    text = st.session_state.get(f"search-{name}", "")
    offered = {run["id"]: run for run in visitor.client().runs(limit=_RECENT, text=text, archived="any")["items"]}
    for run in (*st.query_params.get_all(name), *st.session_state.get(f"in_{name}", [])):
        if run not in offered:
            try:
                offered[run] = visitor.client().run(run)
            except Refused:
                st.caption("A run in the URL no longer exists.")
    names = unique_labels(offered)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = permalinks.multi(
            label, name, list(offered), default, format_func=names.__getitem__, max_selections=most,
            placeholder="by name",
        )  # fmt: skip
        st.text_input(
            "Search runs", key=f"search-{name}", placeholder="name, tag, id", width=220, icon=":material/search:"
        )
    clipped: dict[str, tuple[list[str], int]] = st.session_state.setdefault("clipped", {})
    if len(asked) > most:
        clipped[name] = (chosen, len(asked))
    elif name in clipped and clipped[name][0] != chosen:
        del clipped[name]
    return {run: offered[run] for run in chosen if run in offered}


def left_out(name: str) -> None:
    """Say that more runs were requested than the view shows, until other runs are selected."""
    if name in (clipped := st.session_state.get("clipped", {})):
        chosen, asked = clipped[name]
        st.warning(f"Showing the first {len(chosen)} of {count(asked)} runs.", icon=":material/filter_list:")
