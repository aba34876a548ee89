"""A PostgreSQL server of our own on loopback, from the programs that are installed; ended with the tests."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg

from gxpo_services.local.ray_head import free_port

USER = "gxpo"
NOT_INSTALLED = "PostgreSQL's server programs (initdb, postgres) are not installed"


def find_programs() -> Path | None:
    """The folder that holds initdb and postgres, None where the server is not installed."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("initdb")
    if on_path:
        folders.append(Path(on_path).parent)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


class PostgresServer:
    """One server in a temporary folder. fsync: off is right for tests, on for measurements."""

    def __init__(self, programs: Path, *, fsync: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gxpo-postgres-"))
        self._as_user = self._user()
        self.port = free_port()
        data = self.folder / "data"
        command = [str(programs / "initdb"), "-D", str(data), "-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=self.folder, **self._as_user)
        options = [f"-p{self.port}", "-clisten_addresses=127.0.0.1", f"-cunix_socket_directories={self.folder}"]
        options += [] if fsync else ["-cfsync=off", "-csynchronous_commit=off", "-cfull_page_writes=off"]
        log = (self.folder / "server.log").open("wb")
        self._process = subprocess.Popen(
            [str(programs / "postgres"), "-D", str(data), *options], stdout=log, stderr=log, **self._as_user
        )
        log.close()
        self._wait()

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://{USER}@127.0.0.1:{self.port}/{database}"

    def create(self, database: str, template: str = "template1") -> str:
        """Make a database, as a copy of `template`; its URL."""
        with self._connect() as connection:
            connection.execute(f'CREATE DATABASE "{database}" TEMPLATE "{template}"')
        return self.url(database)

    def drop(self, database: str) -> None:
        with self._connect() as connection:
            connection.execute(f'DROP DATABASE IF EXISTS "{database}" WITH (FORCE)')

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP for the server and its processes, as when its host is frozen; they go on after it."""
        processes = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def close(self) -> None:
        # SIGINT: a fast shutdown. SIGTERM would wait for connections that a test left open.
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=30)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(f"host=127.0.0.1 port={self.port} user={USER} dbname=postgres", autocommit=True)

    def _user(self) -> dict[str, int]:
        """PostgreSQL refuses to run as root: use the account that its package makes."""
        if os.geteuid() != 0:
            return {}
        account = pwd.getpwnam("postgres")
        os.chown(self.folder, account.pw_uid, account.pw_gid)
        return {"user": account.pw_uid, "group": account.pw_gid}

    def _wait(self) -> None:
        for _ in range(600):
            try:
                self._connect().close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None:
                    break
                time.sleep(0.1)
        raise RuntimeError("PostgreSQL did not start:\n" + (self.folder / "server.log").read_text())
