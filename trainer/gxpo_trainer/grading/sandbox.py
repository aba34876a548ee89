"""`gxpo sandbox`: a reward server that runs a response's Python code against the tests of its problem.

It answers the requests of reward components over HTTP (grading/http_rewards.py). The tests are `extra["tests"]`, a
list, or its JSON text, of

    {"call": "add", "args": [2, 3], "kwargs": {}, "expected": 5}     calls a function of the code
    {"stdin": "2 3\\n", "stdout": "5\\n"}                              runs the code as a program

and the reward is the share of them that pass. Each test is one process tree in namespaces of its own, by bubblewrap:

    sh: first to be killed when memory is short -> bwrap, outside -> bwrap as process 1 -> Python: limits -> the code

The code is given its input alone. What it returns leaves as JSON in a file in memory and is compared here, so nothing
that it does to its own process, from `sys.exit` to another `json.dumps`, can pass a test that its answer does not pass.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import platform
import re
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from gxpo_trainer.errors import ConfigError

MAX_BODY_BYTES = 4 * 2**20
_MAX_DISCARDED = 64_000_000
MAX_TESTS = 200
FILE_BYTES = 8 * 2**20
"""Largest file that the code can write, also of what it prints and what it returns."""
TMP_BYTES = 32 * 2**20
"""Size of /tmp, the only folder that the code can write to."""
START_S = 30
"""Time in which bubblewrap and Python start."""
SHOWN = 2000
"""Characters of the output in an answer."""
_NOBODY = 65534
"""The kernel limits root's processes by no RLIMIT_NPROC, so a server of root runs code as this user."""

_BOOT = """
import json, os, resource, sys
limits, length, started, result = json.loads(sys.argv[1])
for name, value in limits.items():
    resource.setrlimit(getattr(resource, name), (value, value))
asked = json.loads(os.read(0, length))
os.write(started, b"+")
os.close(started)
module = {"__name__": "__main__"}
exec(compile(asked["code"], "response.py", "exec"), module)
if "call" in asked:
    value = json.dumps(module[asked["call"]](*asked["args"], **asked["kwargs"])).encode()
    os.ftruncate(result, 0)
    os.pwrite(result, value, 0)
"""

_DENIED = """
add_key 248 217, bpf 321 280, fanotify_init 300 262, fsconfig 431 431, fsmount 432 432, fsopen 430 430, fspick 433 433,
io_uring_enter 426 426, io_uring_register 427 427, io_uring_setup 425 425, kcmp 312 272, keyctl 250 219,
memfd_create 319 279, memfd_secret 447 447, mount 165 40, mount_setattr 442 442, move_mount 429 429, mq_open 240 180,
msgget 68 186, name_to_handle_at 303 264, open_tree 428 428, perf_event_open 298 241, personality 135 92,
pidfd_getfd 438 438, pivot_root 155 41, process_madvise 440 440, process_vm_readv 310 270, process_vm_writev 311 271,
ptrace 101 117, request_key 249 218, semget 64 190, setns 308 268, shmget 29 194, socket 41 198, umount2 166 39,
unshare 272 97, userfaultfd 323 282, vmsplice 278 75
"""
"""System calls, with their numbers on x86-64 and arm64, that need no capability and reach other processes, the network,
new namespaces, memory that no limit counts, or parts of the kernel that programs seldom use."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
"""Column of `_DENIED`, AUDIT_ARCH_…, number of clone."""
_NEW_NAMESPACES = 0x7E020000
"""All CLONE_NEW… that clone can have."""


class SandboxUnavailable(Exception):
    """The code was not started, for a reason that is not its own."""


@dataclass(frozen=True, slots=True)
class _Ran:
    """What a process tree left. value: JSON of the returned value. reason: why it failed, empty when it did not."""

    value: bytes
    stdout: str
    stderr: str
    reason: str
    seconds: float


class Sandbox:
    """Runs code. seconds: for all tests of a response. memory_mb: address space of each process. processes: of a test
    at a time, threads included, with one that is bubblewrap's.

    python: the interpreter; its prefix can be read by the code. None: this one, or /usr/bin/python3 where the account
    that runs the code cannot use this one. Raises ConfigError when this machine cannot isolate code.
    """

    def __init__(self, seconds: float, memory_mb: int, processes: int, python: str | None = None) -> None:
        self.seconds = seconds
        self._limits = {
            "RLIMIT_AS": memory_mb * 2**20,
            "RLIMIT_CPU": math.ceil(seconds),
            "RLIMIT_NPROC": processes,
            "RLIMIT_FSIZE": FILE_BYTES,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        }
        if (machine := platform.machine()) not in _ARCHITECTURES:
            raise ConfigError(f"gxpo sandbox: has a seccomp filter for x86_64 and aarch64, not for {machine}")
        self._filter = seccomp_filter(machine)
        if shutil.which("bwrap") is None:
            raise ConfigError("gxpo sandbox: needs bubblewrap (bwrap); install your distribution's package bubblewrap")
        reasons = []
        for candidate in [python] if python else dict.fromkeys([os.path.realpath(sys.executable), "/usr/bin/python3"]):
            self._python = candidate
            try:
                ran = self._run({"code": "def two(): return 1 + 1", "call": "two", "args": [], "kwargs": {}}, "", 60.0)
                if ran.value == b"2":
                    return
                reasons.append(f"{candidate}: {ran.reason}")
            except SandboxUnavailable as error:
                reasons.append(f"{candidate}: {error}")
        raise ConfigError(
            f"gxpo sandbox: cannot isolate code here ({'; '.join(reasons)}); it needs the right to create user "
            "namespaces and a Python that every account can read (docs/sandbox.md)"
        )

    def grade(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request: share of tests passed, their numbers, the first reason, and its output.

        Tests that the time does not suffice for do not pass. Raises ValueError for a request without usable tests,
        SandboxUnavailable.
        """
        response, extra = body.get("response"), body.get("extra")
        if not isinstance(response, str) or not isinstance(extra, dict):
            raise ValueError('has no "response" and "extra"; set per = "response"')
        tests, code = _checked(extra.get("tests")), code_of(response)
        left, passed, reason, output = self.seconds, 0, "", ""
        for number, test in enumerate(tests, start=1):
            if left <= 0:
                break
            asked = {name: test[name] for name in ("call", "args", "kwargs") if name in test}
            ran = self._run({"code": code} | asked, test.get("stdin", ""), left)
            left -= ran.seconds
            if (failure := _failure(test, ran)) and not reason:
                reason, output = f"test {number}: {failure}", (ran.stdout + ran.stderr)[:SHOWN]
            passed += not failure
        share = passed / len(tests)
        return {"reward": share, "passed": passed, "tests": len(tests), "reason": reason[:SHOWN], "output": output}

    def _run(self, asked: Mapping[str, Any], stdin: str, seconds: float) -> _Ran:
        """Run the code once, for at most `seconds` from when it starts. Raises SandboxUnavailable."""
        header = json.dumps(asked).encode()
        reader, started = os.pipe()
        with ExitStack() as stack, os.fdopen(reader, "rb") as ready:
            files = [stack.enter_context(os.fdopen(os.memfd_create("sandbox"), "w+b")) for _ in range(5)]
            rules, given, value, out, err = files
            for file, content in ((rules, self._filter), (given, header + stdin.encode(errors="replace"))):
                file.write(content)
                file.seek(0)
            boot = json.dumps([self._limits, len(header), started, value.fileno()])
            user = _NOBODY if os.geteuid() == 0 else None
            try:
                process = subprocess.Popen(
                    [*self._command(rules.fileno()), "-I", "-B", "-c", _BOOT, boot],
                    stdin=given,
                    stdout=out,
                    stderr=err,
                    pass_fds=(rules.fileno(), started, value.fileno()),
                    user=user,
                    group=user,
                    extra_groups=None if user is None else [],
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise SandboxUnavailable(f"cannot start as user {user or os.geteuid()}: {error}") from error
            finally:
                os.close(started)
            # The mark is in a pipe, and the time begins with it, because code that could take it back, or use up the
            # time in which the next test starts, would have no reward in place of 0.
            poll = select.poll()
            poll.register(ready, select.POLLIN)
            runs = bool(poll.poll(START_S * 1000)) and ready.read(1) == b"+"
            begin = time.monotonic()
            try:
                code = process.wait(seconds if runs else 1.0)
                reason = "" if code == 0 else f"exit code {code}"
            except subprocess.TimeoutExpired:
                reason = f"the time limit of {self.seconds:g} s for all tests was reached"
            finally:
                # With the outer bwrap process 1 dies, and with it all others in its namespace.
                process.kill()
                process.wait()
            for file in (value, out, err):
                file.seek(0)
            stderr = err.read().decode(errors="replace")
            last = stderr.strip().rpartition("\n")[2][:SHOWN]
            if not runs:
                raise SandboxUnavailable(last or f"did not start within {START_S} s")
            reason = f"{reason}: {last}" if reason.startswith("exit") and last else reason
            used = time.monotonic() - begin
            return _Ran(value.read(), out.read().decode(errors="replace"), stderr, reason, used)

    def _command(self, rules: int) -> list[str]:
        """rules: file descriptor of the seccomp filter."""
        # The unresolved prefix is that of a virtual environment.
        prefixes = {str(Path(path).parent.parent) for path in (self._python, os.path.realpath(self._python))}
        binds = [word for prefix in sorted(prefixes - {"/", "/usr"}) for word in ("--ro-bind", prefix, prefix)]
        flags = (
            f"--unshare-all --unshare-user --uid {_NOBODY} --gid {_NOBODY} --die-with-parent --new-session --clearenv "
            f"--cap-drop ALL --seccomp {rules} --ro-bind /usr /usr --ro-bind-try /etc/ld.so.cache /etc/ld.so.cache "
            "--symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 --dev-bind /dev/null /dev/null "
            f"--dev-bind /dev/zero /dev/zero --dev-bind /dev/urandom /dev/urandom --size {TMP_BYTES} --tmpfs /tmp "
            "--chdir /tmp --setenv HOME /tmp --setenv PATH /usr/bin --setenv LANG C.UTF-8"
        )
        killed_first = ("/bin/sh", "-c", 'echo 1000 >/proc/self/oom_score_adj; exec "$@"', "sh", "bwrap")
        return [*killed_first, *flags.split(), *binds, "--remount-ro", "/", "--", self._python]


def seccomp_filter(machine: str) -> bytes:
    """The BPF program that denies `_DENIED` and new namespaces, and kills callers by another architecture's numbers."""
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny, absent, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    column, architecture, clone = _ARCHITECTURES[machine]
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0)]
    lines += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, kill)]  # x32
    for entry in _DENIED.split(","):
        lines += [(equal, 0, 1, int(entry.split()[1 + column])), (answer, 0, 0, deny)]
    # The flags of clone3 lie in memory; without it the C library calls clone.
    lines += [(equal, 0, 1, 435), (answer, 0, 0, absent)]
    lines += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 0, 1, _NEW_NAMESPACES), (answer, 0, 0, deny)]
    return b"".join(struct.pack("HBBI", *line) for line in [*lines, (answer, 0, 0, allow)])


def code_of(response: str) -> str:
    """The last block of Python code, else the last one of no language, or all of the response where it has neither."""
    blocks = re.findall(r"```([\w+#.-]*)[^\S\n]*\n(.*?)(?:```|\Z)", response, re.DOTALL)
    python = [code for language, code in blocks if language.lower() in ("python", "py", "python3")]
    plain = [code for language, code in blocks if not language]
    return str((python or plain or [response])[-1])


def _checked(tests: Any) -> list[dict[str, Any]]:
    """Tests with all fields that a call needs. Raises ValueError."""
    if isinstance(tests, str):
        tests = json.loads(tests)
    if not isinstance(tests, list) or not 1 <= len(tests) <= MAX_TESTS or not all(isinstance(t, dict) for t in tests):
        raise ValueError(f"extra.tests must be a list of 1 to {MAX_TESTS} tests")
    # A struct of Parquet has every field in every row.
    given = [{name: value for name, value in test.items() if value is not None or name == "expected"} for test in tests]
    checked = [{"args": [], "kwargs": {}, "stdin": "", **test} for test in given]
    calls = {"call": str, "args": list, "kwargs": dict, "stdin": str, "expected": object}
    for number, test in enumerate(checked, start=1):
        kinds = calls if "call" in test else {"stdin": str, "stdout": str}
        if not all(name in test and isinstance(test[name], kind) for name, kind in kinds.items()):
            raise ValueError(f"extra.tests: test {number} must have call and expected, or stdout (docs/sandbox.md)")
    return checked


def _failure(test: Mapping[str, Any], ran: _Ran) -> str:
    """Why the test failed, empty when it passed."""
    if ran.reason:
        return ran.reason
    if "call" not in test:
        lines = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (ran.stdout, test["stdout"])]
        return "" if lines[0] == lines[1] else f"printed {ran.stdout[:200]!r}, expected {test['stdout'][:200]!r}"
    if not ran.value:
        return "ended before the function returned"
    shown = ran.value[:200].decode(errors="replace")
    try:
        if same(json.loads(ran.value), test["expected"]):
            return ""
    except (ValueError, RecursionError):
        return f"returned {shown}, which is not JSON"
    return f"returned {shown}, expected {json.dumps(test['expected'])[:200]}"


def same(value: Any, expected: Any) -> bool:
    """Whether two JSON values are equal; numbers up to rounding where one is no integer, and true is not 1."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same(value[name], expected[name]) for name in expected)
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if {type(value), type(expected)} in ({float}, {int, float}):
        try:
            return math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12)
        except OverflowError:
            return False
    return bool(value == expected)


async def received(request: Request, most: int) -> bytes | None:
    """The body of a request; None where it has more bytes. What is too much is read, up to a limit: to close before
    would reset the connection, and its sender might never see the answer."""
    content, length = bytearray(), 0
    async for part in request.stream():
        length += len(part)
        if length > _MAX_DISCARDED:
            break
        content += part if length <= most else b""
    return bytes(content) if length <= most else None


def serve(sandbox: Sandbox, host: str, port: int, concurrency: int) -> None:
    """Answer requests until the process ends. concurrency: responses that are tested at the same time.

    A request that cannot be graded is answered with 400, and with 503 when the code could not be started, which a
    component asks again; neither is a reward.
    """
    threads = ThreadPoolExecutor(concurrency)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request, status = Request(scope, receive), 200
        answer: dict[str, Any] = {"ready": True}
        try:
            if request.method == "POST":
                content = await received(request, MAX_BODY_BYTES)
                # Another type could be sent by any page in a browser on this machine.
                if not content or request.headers.get("Content-Type", "").partition(";")[0] != "application/json":
                    raise ValueError(f"must be JSON of 1 to {MAX_BODY_BYTES} bytes, with its type")
                body, left = json.loads(content), asyncio.ensure_future(receive())
                try:
                    answer = await asyncio.get_running_loop().run_in_executor(
                        threads, lambda: {} if left.done() else sandbox.grade(body)
                    )
                finally:
                    left.cancel()
        except (ValueError, TypeError, AttributeError, RecursionError, SandboxUnavailable) as error:
            status = 503 if isinstance(error, SandboxUnavailable) else 400
            answer = {"error": str(error) if status == 503 else f"the request {error}"}
            print(status, answer["error"], file=sys.stderr, flush=True)
        await JSONResponse(answer, status)(scope, receive, send)

    with socket.create_server((host, port), backlog=128) as listener:
        print(f"sandbox: ready on http://{host}:{listener.getsockname()[1]}/", flush=True)
        uvicorn.Server(uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_config=None)).run(
            sockets=[listener]
        )
