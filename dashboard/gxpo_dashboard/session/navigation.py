"""Navigation between views.

All views are one Streamlit page, selected by the query parameter `view`. Streamlit cannot switch pages from the server
while fragments refresh themselves: a pending refresh still names the old page, and the browser then drops the new
elements. Paths (`/compare?runs=…`) work as entry points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import streamlit as st

DEFAULT = "runs"


def wanted(address: Mapping[str, str], path: str, views: Sequence[str]) -> str:
    """The view selected by `view`, the path, or the default. Pure."""
    for name in (address.get("view", ""), path.strip("/")):
        if name in views:
            return name
    return DEFAULT


def go(view: str, **query: Any) -> None:
    """Switch to a view; lists become repeated parameters, empty values are omitted."""
    found = {name: value for name, value in query.items() if value}
    st.query_params.from_dict({"view": view, **found})
    st.rerun()


def bar(titles: Mapping[str, tuple[str, str]], current: str) -> None:
    """The navigation bar (name → title, icon); each view opens with its last parameters."""
    left: dict[str, dict[str, list[str]]] = st.session_state.setdefault("left", {})
    left[current] = {name: st.query_params.get_all(name) for name in st.query_params if name != "view"}
    for name, (title, icon) in titles.items():
        kind: Literal["primary", "tertiary"] = "primary" if name == current else "tertiary"
        if st.button(title, icon=icon, type=kind, key=f"nav-{name}") and name != current:
            go(name, **left.get(name, {}))
