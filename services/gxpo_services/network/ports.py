"""Ports of loopback that nothing listens on."""

from __future__ import annotations

import socket

from gxpo_trainer.errors import ConfigError

_TRIES = 50


def free_port(wanted: int | None = None) -> int:
    """`wanted` or the next free one after it; any free one when none is wanted.

    Raises ConfigError when a run of ports from `wanted` on is taken.
    """
    if wanted is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])
    for port in range(wanted, min(wanted + _TRIES, 65536)):
        if _is_free(port):
            return port
    raise ConfigError(f"no port from {wanted} on is free; name another with --port or --dashboard-port")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a port whose last connections linger can be taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
