"""Free ports on loopback."""

from __future__ import annotations

import socket

from gxpo_trainer.errors import ConfigError

_TRIES = 50


def free_port(wanted: int | None = None) -> int:
    """`wanted` or the next free port after it; any free port without `wanted`.

    Raises ConfigError when the next ports are all taken.
    """
    if wanted is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])
    for port in range(wanted, min(wanted + _TRIES, 65536)):
        if _is_free(port):
            return port
    raise ConfigError(f"no free port from {wanted} on; choose another with --port or --dashboard-port")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do, to reuse a port in TIME_WAIT.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
