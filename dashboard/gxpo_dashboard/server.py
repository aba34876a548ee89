"""What `streamlit run` serves: the page in app.py, behind the sign-in by link."""

from __future__ import annotations

from pathlib import Path

from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from streamlit.starlette import App

from gxpo_dashboard.session.link import LinkSignIn

# Streamlit sends its scripts as they are: two thirds of the bytes of a first load, of which a browser keeps them.
_COMPRESSED = Middleware(GZipMiddleware, compresslevel=6)

app = App(Path(__file__).with_name("app.py"), middleware=[Middleware(LinkSignIn), _COMPRESSED])
