"""What `streamlit run` serves: the page in app.py, behind the sign-in by link."""

from __future__ import annotations

from pathlib import Path

from starlette.middleware import Middleware
from streamlit.starlette import App

from gxpo_dashboard.session.link import LinkSignIn

app = App(Path(__file__).with_name("app.py"), middleware=[Middleware(LinkSignIn)])
