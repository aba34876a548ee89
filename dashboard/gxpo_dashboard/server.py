"""What `streamlit run` serves: the page in app.py, behind the sign-in by link."""

from __future__ import annotations

from pathlib import Path

from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import Receive, Scope, Send
from streamlit.starlette import App

from gxpo_dashboard.session.link import LinkSignIn


class CompressedScripts(GZipMiddleware):
    """Compress scripts: Streamlit sends them as they are, two thirds of the bytes of a first load. Downloads stay as
    they are; their archives would hold up the event loop for nothing."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = super().__call__ if "/static/" in scope.get("path", "") else self.app
        await answer(scope, receive, send)


app = App(
    Path(__file__).with_name("app.py"),
    middleware=[Middleware(LinkSignIn), Middleware(CompressedScripts, compresslevel=6)],
)
