"""Commands that run a part of the service on this machine, or work on its database."""

from __future__ import annotations

import argparse
import gc
import os
import socket

from gxpo_client import formats
from gxpo_services.auth.tokens import prepare_local
from gxpo_services.cli.common import confirm
from gxpo_services.db import migrate as databases
from gxpo_services.settings import make_home, need_roots, read_settings
from gxpo_trainer.errors import ConfigError


def serve(args: argparse.Namespace) -> int:
    """Serve the API. On loopback, the first start creates the tables and the local token.

    Elsewhere one job runs `gxpo migrate` before any replica starts.
    """
    import uvicorn

    from gxpo_services.api.connections import raise_descriptor_limit, server_config
    from gxpo_services.app import create_app

    settings = read_settings(host=args.host, port=args.port)
    os.environ.update(settings.allowlists)
    need_roots(settings)
    _need_port(settings.host, settings.port)
    if settings.is_loopback:
        prepare_local(settings)
    else:
        databases.need_current(settings.url)
    raise_descriptor_limit()
    options = {"host": settings.host, "port": settings.port, "log_level": "warning", "timeout_graceful_shutdown": 5}
    server = uvicorn.Server(server_config(create_app(settings), settings.max_head_s, **options))
    # What is loaded now stays: a collection that goes through it stops all threads for more than 100 ms.
    gc.collect()
    gc.freeze()
    server.run()
    return 0 if server.started else 1


def _need_port(host: str, port: int) -> None:
    """Raise ConfigError where nothing can listen; uvicorn finds that out after the home is made."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            probe.bind(address)
    except OSError as error:
        fix = "choose another with --port or --host"
        raise ConfigError(f"cannot listen on {host}, port {port} ({error.strerror}); {fix}") from None


def scheduler(args: argparse.Namespace) -> int:
    from gxpo_services import logging
    from gxpo_services.scheduling.launcher import RayLauncher
    from gxpo_services.scheduling.scheduler import LONGEST_ROUND_S, is_alive, serve as serve_runs

    settings = read_settings()
    if args.check:
        alive = is_alive(settings.home)
        print(f"{'a' if alive else 'no'} round within {LONGEST_ROUND_S:g} s")
        return 0 if alive else 1
    os.environ.update(settings.allowlists)
    logging.configure(as_json=settings.log_json)
    need_roots(settings)
    make_home(settings)
    serve_runs(settings, RayLauncher(settings.ray_address))
    return 0


def migrate(args: argparse.Namespace) -> int:
    settings = read_settings()
    if args.check:
        current = databases.revision_at(settings.url) == databases.newest_revision()
        print(f"{'at' if current else 'not at'} revision {databases.newest_revision()}")
        return 0 if current else 1
    if settings.database_url is None:
        make_home(settings)
    databases.upgrade(settings.url)
    print(f"at revision {databases.newest_revision()}")
    return 0


def backup(args: argparse.Namespace) -> None:
    size = databases.back_up(read_settings(home=args.home).url, args.file)
    print(f"{args.file} ({formats.size(size)})")


def restore(args: argparse.Namespace) -> None:
    settings = read_settings(home=args.home)
    confirm(f"Replace the database of {settings.home} by {args.file}?", args.yes, "restored")
    damaged = databases.restore(settings.url, args.file)
    print(f"restored {args.file}" + (f"; the damaged database is now {damaged}" if damaged else ""))
