"""Visitors of the dashboard who draw nothing, and a relay that counts what the dashboard fetches."""

from __future__ import annotations

import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import SHUT_WR, create_connection, socket
from typing import Self
from urllib.parse import urlsplit

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.sync.client import ClientConnection, connect

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.dashboard_process import DashboardProcess


class Visitor:
    """A client of Streamlit's protocol that draws nothing: asks for a view, then for its parts as a browser would."""

    def __init__(self, socket: ClientConnection, query: str) -> None:
        self._socket, self._query = socket, query
        self.parts: dict[str, float] = {}
        self._ask(None)

    def refresh(self, part: str) -> float:
        """Milliseconds from the request for a part to the end of its answer."""
        begin = time.perf_counter()
        self._ask(part)
        return 1e3 * (time.perf_counter() - begin)

    def _ask(self, part: str | None) -> None:
        request = BackMsg()
        request.rerun_script.query_string = self._query
        if part is not None:
            request.rerun_script.fragment_id = part
            request.rerun_script.is_auto_rerun = True
        self._socket.send(request.SerializeToString())
        while True:
            data = self._socket.recv()
            assert isinstance(data, bytes)
            message = ForwardMsg.FromString(data)
            kind = message.WhichOneof("type")
            if kind == "auto_rerun":
                self.parts[message.auto_rerun.fragment_id] = message.auto_rerun.interval
            if kind == "delta":
                assert message.delta.new_element.WhichOneof("type") != "exception", message
            if kind == "script_finished":
                return


@contextmanager
def visiting(dashboard: DashboardProcess, query: str) -> Iterator[Visitor]:
    """A visitor with a session of their own, who came by the dashboard's link."""
    cookie = dashboard.cookie
    headers = {"Cookie": f"{cookie['name']}={cookie['value']}"}
    address = f"ws://127.0.0.1:{dashboard.port}/_stcore/stream"
    with connect(address, max_size=None, additional_headers=headers) as stream:
        yield Visitor(stream, query)


class Relay:
    """Passes connections on to a service; num_bytes: what the service has sent."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url).hostname, urlsplit(url).port
        self.num_bytes = 0
        relay = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with create_connection(relay._target) as service:
                    threading.Thread(target=_pass, args=(self.request, service), daemon=True).start()
                    for size in _passed(service, self.request):
                        relay.num_bytes += size

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _passed(source: socket, sink: socket) -> Iterator[int]:
    """Pass bytes on until the source ends; the size of each piece."""
    while piece := source.recv(65_536):
        sink.sendall(piece)
        yield len(piece)


def _pass(source: socket, sink: socket) -> None:
    with suppress(OSError):  # the service has closed its connection
        for _ in _passed(source, sink):
            continue
        sink.shutdown(SHUT_WR)
