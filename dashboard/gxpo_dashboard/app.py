"""The dashboard: navigation between its views, and who may see them. Run by `streamlit run`."""

from __future__ import annotations

import gc
from pathlib import Path

import streamlit as st

from gxpo_dashboard.session import navigation, visitor
from gxpo_dashboard.text.labels import plain
from gxpo_dashboard.views import VIEWS


def _nothing() -> None:
    """Streamlit's pages are only entries here; see navigation.py."""


@st.cache_resource
def _set_up() -> None:
    """After the first page. Streamlit looks for garbage after every run of a part of the page, among all objects of
    the process, and nothing is sent meanwhile; what the modules made is none and need not be looked at."""
    gc.collect()
    gc.freeze()


ICON = str(Path(__file__).with_name("icon.png"))
entries = [st.Page(_nothing, title=title, url_path=name) for name, (title, _, _) in VIEWS.items()]
entry = st.navigation([st.Page(_nothing, title="gxpo", default=True), *entries], position="hidden")
view = navigation.wanted(st.query_params, entry.url_path, list(VIEWS))
title, _, show = VIEWS[view]
st.set_page_config(page_title=f"{title} · gxpo", page_icon=ICON, layout="wide")
# A visitor without a token sees the sign-in and nothing else, not even what there would be.
if visitor.enter():
    me = st.session_state["me"]
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        navigation.bar({name: (title, icon) for name, (title, icon, _) in VIEWS.items()}, view)
        with st.popover(plain(me["name"]), icon=":material/account_circle:", type="tertiary"):
            st.markdown(f"Signed in as **{plain(me['name'])}**, {plain(me['role'])}")
            st.text(f"Service: {visitor.service_url()}")
            st.button("Sign out", on_click=visitor.sign_out, icon=":material/logout:")
    show()
    _set_up()
