"""An application behind a socket of its own, for tests of what speaks HTTP."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI

from gxpo_services.api.connections import server_config

_LONG_S = 60


def received(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    answer = b""
    with suppress(ConnectionResetError):  # closed with unread bytes of ours
        while piece := connection.recv(1 << 16):
            answer += piece
    return answer


class HttpServer:
    """Entering starts it; the address is what `with` gives. http: `own` is that of `gxpo serve`."""

    def __init__(
        self, app: FastAPI, http: Literal["own", "httptools"] = "own", *, port: int = 0, grace_s: int = 1
    ) -> None:
        options: dict[str, Any] = {"port": port, "log_level": "error", "timeout_graceful_shutdown": grace_s}
        if http == "own":
            config = server_config(app, head_s=10.0, **options)
        else:
            config = uvicorn.Config(app, http=http, **options)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        give_up = time.monotonic() + _LONG_S
        while not self._server.started:
            assert time.monotonic() < give_up, "the API did not start"
            time.sleep(0.02)
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(_LONG_S)
