"""The dashboard: navigation between its views, and who may see them. Run by `streamlit run`."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from gxpo_dashboard import session
from gxpo_dashboard.texts import plain
from gxpo_dashboard.views import pages

ICON = str(Path(__file__).with_name("icon.png"))
st.set_page_config(page_title="gxpo", page_icon=ICON, layout="wide", initial_sidebar_state="collapsed")
known = session.enter()
# A visitor without a token sees the sign-in and nothing else, not even what there would be.
page = st.navigation(list(pages().values()), position="top" if known else "hidden")
if known:
    with st.sidebar:
        me = st.session_state["me"]
        st.markdown(f"Signed in as **{plain(me['name'])}** ({plain(me['role'])})")
        st.text(f"Service: {session.service_url()}")
        st.button("Sign out", on_click=session.sign_out, icon=":material/logout:")
    page.run()
