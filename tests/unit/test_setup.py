"""`requirements/install.sh` on a stranger's machine: the package index lacks torch's CPU build, PyTorch's own has it.

Both indexes are stand-ins on loopback. uv reaches the second one by its own address, through a proxy that answers for
every host with a certificate made for the test.
"""

from __future__ import annotations

import datetime
import hashlib
import http.server
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "requirements" / "install.sh"
BACKEND = """
import base64, hashlib, zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "project-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        info = "project-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: project\\nVersion: 1.0\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""


def write_wheel(folder: Path, name: str, version: str, script: str | None = None) -> None:
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}_stand_in.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if script:
        files[f"{name}-{version}.data/scripts/{name}"] = script
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o100755 << 16  # a regular file: pip keeps its mode
            wheel.writestr(entry, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]))


class Index(http.server.BaseHTTPRequestHandler):
    """Package pages at any `…/NAME/`, files at any `…/FILE.whl`, from the server's folder; notes what was asked."""

    server: IndexServer

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        last = self.path.rstrip("/").rsplit("/", 1)[-1].replace("%2B", "+")
        wheels = {path.name: path.read_bytes() for path in self.server.folder.glob("*.whl")}
        if last in wheels:
            self._answer(wheels[last], "application/octet-stream")
            return
        links = "".join(
            f'<a href="/files/{name}#sha256={hashlib.sha256(data).hexdigest()}">{name}</a>'
            for name, data in wheels.items()
            if name.startswith(f"{last}-")
        )
        self._answer(f"<!DOCTYPE html><html><body>{links}</body></html>".encode() if links else None, "text/html")

    def _answer(self, body: bytes | None, kind: str) -> None:
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_: object) -> None:
        """Nothing on the test's standard error."""


class IndexServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, certificate: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Index)
        self.folder, self.paths = folder, list[str]()
        if certificate is not None:
            self.socket = certificate.wrap_socket(self.socket, server_side=True)


@contextmanager
def serving(server: http.server.HTTPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


class Tunnel(http.server.BaseHTTPRequestHandler):
    """A proxy whose every CONNECT ends at one port of this machine, whatever host it names."""

    server: TunnelServer

    def do_CONNECT(self) -> None:
        self.server.hosts.append(self.path)
        with socket.create_connection(("127.0.0.1", self.server.target)) as upstream:
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=self._copy, args=(upstream, self.connection), daemon=True)
            back.start()
            self._copy(self.connection, upstream)
            back.join(10)

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)

    def log_message(self, *_: object) -> None:
        """Nothing on the test's standard error."""


class TunnelServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), Tunnel)
        self.target, self.hosts = target, list[str]()


def certificate(folder: Path, host: str) -> tuple[Path, ssl.SSLContext]:
    """A self-signed certificate for `host`: its file, and a server's context with it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "stand-in")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    public, both = folder / "stand-in.pem", folder / "stand-in-key.pem"
    public.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    both.write_bytes(private + public.read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    return public, context


def tree(folder: Path) -> Path:
    """A clone with the installer, two packages to install and a project to build."""
    (folder / "requirements").mkdir(parents=True)
    shutil.copy(INSTALL, folder / "requirements" / "install.sh")
    (folder / "requirements/cpu.txt").write_text("sample==1.0\ntorch==2.13.0+cpu\n")
    (folder / "requirements/dev.txt").write_text("")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (folder / "backend.py").write_text(BACKEND)
    return folder


def torch_index_host(uv: str, environment: dict[str, str], tunnel: TunnelServer) -> str:
    """The host that uv knows as PyTorch's own index: the first one that it asks the proxy for."""
    command = [uv, "pip", "install", "--dry-run", "--torch-backend=cpu", "--python", sys.executable, "torch==0.0.1"]
    subprocess.run(command, env=environment, capture_output=True, check=False)
    return tunnel.hosts[0].rpartition(":")[0]


@pytest.mark.parametrize("part", ["all", "packages"])
def test_torch_comes_from_its_own_index_where_the_configured_one_lacks_it(part: str, tmp_path: Path) -> None:
    uv = str(Path(sys.executable).with_name("uv"))
    write_wheel(tmp_path / "public", "sample", "1.0")
    write_wheel(tmp_path / "public", "uv", "0.13.8", script=f'#!/bin/sh\nexec {uv} "$@"\n')
    write_wheel(tmp_path / "pytorch", "torch", "2.13.0+cpu")
    clone = tree(tmp_path / "clone")
    own = {key: value for key, value in os.environ.items() if not key.upper().startswith(("PIP_", "UV_"))}
    with serving(public := IndexServer(tmp_path / "public")) as public_port:
        environment = own | {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://127.0.0.1:{public_port}/simple",
            "UV_CACHE_DIR": str(tmp_path / "cache"),
            "UV_HTTP_RETRIES": "0",
            "NO_PROXY": "127.0.0.1",
        }
        with serving(tunnel := TunnelServer(public_port)) as port:
            host = torch_index_host(uv, environment | {"HTTPS_PROXY": f"http://127.0.0.1:{port}"}, tunnel)
        trusted, context = certificate(tmp_path, host)
        with (
            serving(pytorch := IndexServer(tmp_path / "pytorch", context)) as secure_port,
            serving(TunnelServer(secure_port)) as port,
        ):
            environment |= {"HTTPS_PROXY": f"http://127.0.0.1:{port}", "SSL_CERT_FILE": str(trusted)}
            command = ["bash", "requirements/install.sh", str(tmp_path / "venv"), "cpu", part]
            ended = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "has no torch==2.13.0+cpu; fetching it from PyTorch's own (--torch-backend=cpu)" in ended.stdout
    assert any("torch" in path for path in public.paths), "the configured index was asked first"
    assert any(path.endswith(".whl") for path in pytorch.paths)
    listed = subprocess.run(
        [tmp_path / "venv/bin/python", "-m", "pip", "list", "--format=freeze"],
        env=environment, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert {"sample==1.0", "torch==2.13.0+cpu"} <= set(listed)
    assert ("project==1.0" in listed) == (part == "all")


UNAME = '#!/bin/sh\n[ "$1" = -s ] && echo {} || echo {}\n'
NEWER_PYTHON = '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.14.0 && exit 0\nexit 1\n'


@pytest.mark.parametrize(
    ("names", "program", "sentence"),
    [
        (
            ["uname"],
            UNAME.format("Linux", "aarch64"),
            "gxpo is installed from wheels for x86-64; this machine is aarch64",
        ),
        (["uname"], UNAME.format("Darwin", "arm64"), "vLLM has no wheel for macOS"),
        (
            ["python3", "python3.11", "python3.12"],
            NEWER_PYTHON,
            "Python 3.11 or 3.12 is needed (Python 3.14.0 is here; 3.13 and newer have no wheels of vLLM yet)",
        ),
    ],
    ids=["ARM", "macOS", "newer Python"],
)
def test_a_machine_without_wheels_gets_one_sentence(
    names: list[str], program: str, sentence: str, tmp_path: Path
) -> None:
    """names: programs of the machine that are replaced."""
    for name in names:
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(INSTALL), str(tmp_path / "venv"), "cpu"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert sentence in ended.stderr
