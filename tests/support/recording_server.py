"""An HTTP server on loopback that keeps its requests and answers each with a status, and JSON if wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


@dataclass(frozen=True)
class Request:
    path: str
    headers: Message
    body: bytes


class RecordingServer:
    """`respond` gives the status of each request, or its status and content, or None to end the connection; entering
    starts the server."""

    def __init__(self, respond: Callable[[Request], int | tuple[int, bytes] | None]) -> None:
        self.requests: list[Request] = []
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                recorder.requests.append(Request(self.path, self.headers, body))
                answer = respond(recorder.requests[-1])
                if answer is None:
                    self.close_connection = True
                    return
                status, content = (answer, b"") if isinstance(answer, int) else answer
                self.send_response(status)
                self.send_header("Location", "/elsewhere")  # of a redirect, which nobody should follow
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Nothing on stderr."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
