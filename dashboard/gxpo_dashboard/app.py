"""Entry point of the dashboard (`streamlit run`): navigation and sign-in."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import streamlit as st

from gxpo_dashboard.labels import plain
from gxpo_dashboard.session import permalinks, visitor
from gxpo_dashboard.views import benchmarks, compare, palette, run, runs, submit
from gxpo_dashboard.widgets import load_charts

# Name in the URL → title, icon and function.
VIEWS: dict[str, tuple[str, str, Callable[[], None]]] = {
    "runs": ("Runs", ":material/list:", runs.show),
    "run": ("Run", ":material/monitoring:", run.show),
    "compare": ("Compare", ":material/compare_arrows:", compare.show),
    "benchmarks": ("Benchmarks", ":material/leaderboard:", benchmarks.show),
    "submit": ("Submit", ":material/add_circle:", submit.show),
}


def _entry_point() -> None:
    """Streamlit's pages are only entry points; see permalinks.py."""


@st.cache_resource
def _set_up() -> None:
    """Freeze the objects created at import. Streamlit collects garbage after every fragment run, over all objects of
    the process, and sends nothing during a collection."""
    gc.collect()
    gc.freeze()


STYLE = Path(__file__).with_name("style.css")
CROSSHAIR = Path(__file__).with_name("crosshair.js").read_text(encoding="utf-8")
ICON = str(Path(__file__).with_name("icon.png"))
entries = [st.Page(_entry_point, title=title, url_path=name) for name, (title, _, _) in VIEWS.items()]
entry = st.navigation([st.Page(_entry_point, title="gxpo", default=True), *entries], position="hidden")
view = permalinks.view_of(st.query_params, entry.url_path, list(VIEWS))
title, _, show = VIEWS[view]
st.set_page_config(page_title=f"{title} · gxpo", page_icon=ICON, layout="wide")
st.html(STYLE)
# Without a token only the sign-in is shown.
if visitor.enter():
    me = st.session_state["me"]
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        titles = {name: (title, icon) for name, (title, icon, _) in VIEWS.items()}
        permalinks.bar(titles, view)
        palette.button(titles)
        with st.popover(plain(me["name"]), icon=":material/account_circle:", type="tertiary"):
            st.markdown(f"Signed in as **{plain(me['name'])}**, {plain(me['role'])}")
            st.text(f"Service: {visitor.service_url()}")
            st.button("Sign out", on_click=visitor.sign_out, icon=":material/logout:")
    show()
    load_charts()
    st.components.v2.component("gxpo_crosshair", js=CROSSHAIR, isolate_styles=False)(key="crosshair")
    _set_up()
