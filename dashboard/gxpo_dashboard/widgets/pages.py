"""Pages of a list by the service's cursors."""

from __future__ import annotations

from typing import Any

import streamlit as st

from gxpo_client.formats import count


def cursors(name: str, query: Any) -> list[str]:
    """Cursors of the pages up to the current one of the list `name`; another query starts at the first page."""
    if st.session_state.get(f"{name}_query") != query:
        st.session_state[f"{name}_query"], st.session_state[f"{name}_cursors"] = query, []
    found: list[str] = st.session_state[f"{name}_cursors"]
    return found


def pager(name: str, visited: list[str], following: str | None, first: int, num: int, of: str = "") -> None:
    """Buttons to the pages before and after, and the range on this page. first: number of items before it."""
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        if st.button("Back", icon=":material/chevron_left:", disabled=not visited, key=f"{name}-back"):
            visited.pop()
            st.rerun(scope="fragment")
        if st.button("Next", icon=":material/chevron_right:", disabled=not following, key=f"{name}-next"):
            visited.append(str(following))
            st.rerun(scope="fragment")
        st.caption(f"{name.capitalize()} {count(first + 1)} to {count(first + num)}{of}")
