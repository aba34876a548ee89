"""Which view is shown, and how views lead to each other.

All views are one page to Streamlit, told apart by the query parameter `view`. Streamlit's own pages cannot be
changed by the server while parts of them refresh themselves: a refresh that was under way still names the old
page, and the browser then throws away the new one's elements. Paths (`/compare?runs=…`) work as entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import streamlit as st

DEFAULT = "runs"


def wanted(address: Mapping[str, str], path: str, views: Sequence[str]) -> str:
    """The view that an address asks for: by `view`, else by its path, else the default. Pure."""
    for name in (address.get("view", ""), path.strip("/")):
        if name in views:
            return name
    return DEFAULT


def go(view: str, **query: Any) -> None:
    """Lead to a view; lists become repeated parameters, what is empty is left out."""
    found = {name: value for name, value in query.items() if value}
    st.query_params.from_dict({"view": view, **found})
    st.rerun()


def bar(titles: Mapping[str, tuple[str, str]], current: str) -> None:
    """The views side by side (name → title, icon); each opens as it was left."""
    left: dict[str, dict[str, list[str]]] = st.session_state.setdefault("left", {})
    left[current] = {name: st.query_params.get_all(name) for name in st.query_params if name != "view"}
    for name, (title, icon) in titles.items():
        kind: Literal["primary", "tertiary"] = "primary" if name == current else "tertiary"
        if st.button(title, icon=icon, type=kind, key=f"nav-{name}") and name != current:
            go(name, **left.get(name, {}))
