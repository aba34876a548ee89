"""What `streamlit run` serves: the page in app.py, behind the sign-in by link."""

from __future__ import annotations

from pathlib import Path

from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send
from streamlit.starlette import App

from gxpo_dashboard.session.link import LinkSignIn


def compressed(page: ASGIApp) -> ASGIApp:
    """The page with its scripts compressed: Streamlit sends them as they are, two thirds of the bytes of a first load.

    Downloads stay as they are; their archives would hold up the event loop for nothing.
    """
    smaller = GZipMiddleware(page, compresslevel=6)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await (smaller if "/static/" in scope.get("path", "") else page)(scope, receive, send)

    return serve


app = App(Path(__file__).with_name("app.py"), middleware=[Middleware(LinkSignIn), Middleware(compressed)])
