"""`gxpo sandbox`: what passes, and attacks by the code on the machine, on the tests and on the grading."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import uuid
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.reward_server import PATIENCE_S, ask, isolated
from support.service_processes import until

from gxpo_trainer.grading import sandbox as module
from gxpo_trainer.grading.sandbox import TMP_BYTES, Sandbox, code_of, same

MEMORY_MB = 256
PROCESSES = 12


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return isolated(memory_mb=MEMORY_MB, processes=PROCESSES)


@pytest.fixture
def without_filter(monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """One that relies on its namespaces alone."""
    monkeypatch.setattr(module, "seccomp_filter", lambda machine: struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))
    return isolated()


def graded(sandbox: Sandbox, code: str, *tests: dict[str, Any]) -> dict[str, Any]:
    return sandbox.grade({"response": f"Here:\n```python\n{code}\n```\n", "extra": {"tests": list(tests)}})


def returned(sandbox: Sandbox, body: str, **values: object) -> Any:
    """What the function f with this body returns. values: of names in the body."""
    names = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    code = "import ctypes, os, re, signal, subprocess, sys, time\n" + names + "def f():\n"
    code += "".join(f"    {line}\n" for line in body.splitlines())
    answer = graded(sandbox, code, {"call": "f", "expected": "no value is this"})
    found = re.fullmatch(r"test 1: returned (.*), expected \"no value is this\"", answer["reason"], re.DOTALL)
    assert found, answer
    return json.loads(found[1])


ADD = ({"call": "add", "args": [2, 3], "expected": 5}, {"call": "add", "args": [1, -1], "expected": 0})


# ---- what passes -------------------------------------------------------------------------------------------------


def test_the_reward_is_the_share_of_tests_passed_with_the_first_reason(sandbox: Sandbox) -> None:
    assert graded(sandbox, "def add(a, b): return a + b", *ADD) == {
        "reward": 1.0, "passed": 2, "tests": 2, "reason": "", "output": "",
    }  # fmt: skip
    answer = graded(sandbox, "def add(a, b):\n    print('adding')\n    return 5", *ADD)
    assert (answer["reward"], answer["passed"]) == (0.5, 1)
    assert (answer["reason"], answer["output"]) == ("test 2: returned 5, expected 0", "adding\n")
    answer = graded(sandbox, "def add(a, b): return a / b - 1 / (b + 1)", *ADD)
    assert answer["reason"] == "test 1: returned 0.41666666666666663, expected 5"
    assert answer["output"] == ""
    answer = graded(sandbox, "def add(a, b): raise KeyError(a)", *ADD)
    assert answer["reason"] == "test 1: exit code 1: KeyError: 2"
    assert 'File "response.py", line 1, in add' in answer["output"]
    # Tests may be the JSON text of a column of a CSV file, or structs of Parquet.
    code = "def add(a, b): return a + b\nif __name__ == '__main__': print(add(2, 3))"
    none = dict.fromkeys(("call", "args", "kwargs", "expected", "stdin", "stdout"))
    for tests in (json.dumps(ADD), [none | ADD[0], none | {"stdout": "5"}]):
        assert sandbox.grade({"response": code, "extra": {"tests": tests}})["reward"] == 1.0


def test_programs_read_their_input_and_print(sandbox: Sandbox) -> None:
    code = "a, b = map(int, input().split())\nprint(a + b, ' ')\nprint()\nimport sys; print('log', file=sys.stderr)"
    tests = [{"stdin": "2 3\n", "stdout": "5\n"}, {"stdin": "1 1\n", "stdout": "3"}]
    answer = graded(sandbox, code, *tests)
    assert (answer["reward"], answer["reason"]) == (0.5, "test 2: printed '2  \\n\\n', expected '3'")
    assert graded(sandbox, "print('5')", {"stdout": "5"})["reward"] == 1.0


def test_processes_threads_temporary_files_and_event_loops_work(sandbox: Sandbox) -> None:
    code = """
import asyncio, subprocess, sys, tempfile, threading
def work():
    out = []
    thread = threading.Thread(target=lambda: out.append("thread"))
    thread.start(); thread.join()
    out.append(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True).stdout.strip())
    with tempfile.TemporaryFile("w+") as file:
        file.write("file"); file.seek(0); out.append(file.read())
    out.append(asyncio.run(asyncio.sleep(0, "loop")))
    return out
"""
    answer = graded(sandbox, code, {"call": "work", "expected": ["thread", "child", "file", "loop"]})
    assert (answer["reward"], answer["reason"]) == (1.0, "")


def test_the_last_python_block_is_the_code() -> None:
    codes = {
        "x = 1": "x = 1",
        "```python\na\n```\nBetter:\n```py\nb\n```\nDone.": "b\n",
        # Models often name no language; blocks of other languages are no code.
        "It is\n```\nno language\n```\nDone.": "no language\n",
        "```\nprinted\n```\n```python3\na\n```\n```\nprinted\n```": "a\n",
        "```bash\npip\n```\nThen\n```python\na\n```": "a\n",
        "```bash\npip\n```": "```bash\npip\n```",
        "```Python  \ncut off": "cut off",
    }
    assert {response: code_of(response) for response in codes} == codes


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [
        (1, 1, True), (1.0, 1, True), (0.1 + 0.2, 0.3, True), (0.31, 0.3, False), (10**400, 1.5, False),
        (True, 1, False), (1, True, False), (True, True, True), ("1", 1, False), (None, 0, False), (0, None, False),
        (float("nan"), 1.0, False), (float("inf"), 1.0, False), (10**20 + 1, 10**20, False),
        ([1, [2.0]], [1, [2]], True), ([1, 2], [2, 1], False), ([1], [1, 1], False), ({"0": 1}, [1], False),
        ({"a": [1.0]}, {"a": [1]}, True), ({"a": 1, "b": 2}, {"a": 1}, False), ({"a": True}, {"a": 1}, False),
    ],
)  # fmt: skip
def test_values_are_equal_up_to_rounding_and_true_is_no_number(value: Any, expected: Any, equal: bool) -> None:
    assert same(value, expected) is equal


@pytest.mark.parametrize(
    "tests",
    [None, [], {}, "[", "7", [{}], [7], [{"call": "f"}], [{"call": 1, "expected": 1}], [{"stdin": "1"}],
     [{"call": "f", "args": 1, "expected": 1}], [{"call": "f", "stdin": 5, "expected": 1}], [{"stdout": "1"}] * 201],
)  # fmt: skip
def test_a_problem_without_usable_tests_is_refused(sandbox: Sandbox, tests: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        sandbox.grade({"response": "def f(): return 1", "extra": {"tests": tests}})


# ---- attacks on the machine --------------------------------------------------------------------------------------


def processes_with(token: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if token in " ".join(process.info["cmdline"] or ())]


def test_a_fork_bomb_ends_at_the_limit_of_processes(sandbox: Sandbox) -> None:
    forks = """
n = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(600)
        n += 1
except BlockingIOError:
    return n
"""
    # Of the limit one is process 1 of bubblewrap and one the code itself.
    assert returned(sandbox, forks) == PROCESSES - 2


FORKS = """
    while True:
        try:
            os.fork()
        except BlockingIOError:
            pass
"""


@pytest.mark.parametrize("end", ["    return 1", FORKS])
def test_no_child_stays_after_the_end_or_the_time_limit(end: str) -> None:
    token = uuid.uuid4().hex
    code = f"""
import ctypes, os, signal, subprocess, sys, time
ctypes.CDLL(None).prctl(1, 0)  # no signal when the parent dies
for number in range(1, 60):
    if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33): signal.signal(number, signal.SIG_IGN)
def f():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # {token}"], start_new_session=True)
{end}
"""
    sandbox = isolated(3.0)
    answer = graded(sandbox, code, {"call": "f", "expected": 1})
    if end != FORKS:
        assert answer["reward"] == 1.0
    else:
        assert answer["reason"] == "test 1: the time limit of 3 s for all tests was reached"
    until(lambda: not processes_with(token), "the end of every process")


def test_memory_is_limited(sandbox: Sandbox) -> None:
    allocates = """
try:
    return len(bytearray(MEMORY))
except MemoryError:
    return "refused"
"""
    assert returned(sandbox, allocates, MEMORY=MEMORY_MB // 4 * 2**20) == MEMORY_MB // 4 * 2**20
    assert returned(sandbox, allocates, MEMORY=(MEMORY_MB + 1) * 2**20) == "refused"


def test_files_are_written_to_a_small_tmp_alone(sandbox: Sandbox) -> None:
    fills = """
written = 0
try:
    for n in range(10**6):
        with open(f"/tmp/{n}", "wb", buffering=0) as file:
            for _ in range(4):
                written += file.write(bytes(2**20))
except OSError:
    return written
"""
    assert TMP_BYTES // 2 < returned(sandbox, fills) <= TMP_BYTES
    refused = """
refused = []
for folder in ("/", "/usr", "/usr/lib", "/etc", "/dev", "/dev/shm", "/var/tmp", "/run", "/proc", "/sys"):
    try:
        open(folder + "/x", "w")
    except OSError:
        refused.append(folder)
return len(refused)
"""
    assert returned(sandbox, refused) == 10


@pytest.mark.parametrize("layer", ["sandbox", "without_filter"])
def test_no_server_is_reached_and_no_process_outside_traced_signalled_or_read(
    request: pytest.FixtureRequest, layer: str
) -> None:
    attacks = """
import socket
libc = ctypes.CDLL(None, use_errno=True)
refused = [libc.ptrace(16, TARGET, 0, 0), ctypes.get_errno()]
try:
    socket.create_connection(("127.0.0.1", PORT), 5)
except OSError as error:
    refused.append(error.errno)
try:
    os.kill(TARGET, 0)
except ProcessLookupError:
    return [*refused, os.path.exists("/proc"), os.getppid()]
"""
    # EPERM by the filter; ESRCH, and ECONNREFUSED by the loopback of a network namespace of its own.
    refused = [-1, 1, 1] if layer == "sandbox" else [-1, 3, 111]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        answer = returned(request.getfixturevalue(layer), attacks, PORT=port, TARGET=os.getpid())
        assert answer == [*refused, False, 1]
        with pytest.raises(BlockingIOError):
            listener.accept()
        socket.create_connection(("127.0.0.1", port)).close()
        listener.accept()[0].close()


def test_the_filter_denies_tracing_a_child_and_new_namespaces(sandbox: Sandbox) -> None:
    attacks = """
libc = ctypes.CDLL(None, use_errno=True)
child = os.fork()
if child == 0:
    time.sleep(600)
found = [libc.ptrace(16, child, 0, 0), ctypes.get_errno()]
found += [libc.unshare(0x10000000), ctypes.get_errno()]
found += [libc.syscall(CLONE, 0x10000000 | 17, 0, 0, 0, 0), ctypes.get_errno()]
found += [libc.syscall(435, 0, 0), ctypes.get_errno()]
return found
"""
    clone = 56 if os.uname().machine == "x86_64" else 220
    assert returned(sandbox, attacks, CLONE=clone) == [-1, 1, -1, 1, -1, 1, -1, 38]


def test_no_file_outside_is_read_by_a_path_a_link_or_a_descriptor(sandbox: Sandbox) -> None:
    reads = """
os.symlink(PATH, "/tmp/link")
os.symlink("../" * 40 + PATH, "/tmp/relative")
read = []
for path in (PATH, "/tmp/link", "/tmp/relative", "/tmp/../" + PATH, "/etc/passwd", "/root", "/home"):
    try:
        read.append(os.listdir(path) if os.path.isdir(path) else open(path).read())
    except OSError:
        pass
for descriptor in range(64):
    try:
        read += [descriptor, os.listdir(descriptor)]
    except OSError:
        pass
return read
"""
    folder = Path(tempfile.mkdtemp())  # pytest's own folder is closed to other accounts
    try:
        folder.chmod(0o755)
        (folder / "secret").write_text("secret")
        assert returned(sandbox, reads, PATH=str(folder / "secret")) == []
    finally:
        shutil.rmtree(folder)


def test_a_flood_of_output_is_cut_and_fails(sandbox: Sandbox) -> None:
    answer = graded(sandbox, "def f():\n    while True: print('x' * 100_000)", {"call": "f", "expected": 1})
    assert answer["reason"] == "test 1: exit code 1: OSError: [Errno 27] File too large"
    assert answer["output"] == "x" * module.SHOWN
    answer = graded(sandbox, "def f(): return 'x' * 2 * 10**7", {"call": "f", "expected": 1})
    assert answer["reward"] == 0.0
    assert len(json.dumps(answer)) < 64 * 1024


# ---- attacks on the tests and the grading ------------------------------------------------------------------------


def test_the_expected_values_are_nowhere_in_the_sandbox(sandbox: Sandbox) -> None:
    searches = r"""
import gc, os, re, sys
def f(x):
    seen = [repr(sorted(os.environ.items())), repr(sys.argv), repr(sys.orig_argv), repr(gc.get_objects())]
    frame = sys._getframe()
    while frame:
        seen.append(repr(frame.f_locals)); frame = frame.f_back
    for descriptor in range(64):
        try:
            os.lseek(descriptor, 0, 0); seen.append(os.read(descriptor, 10**6).decode(errors="replace"))
        except OSError:
            pass
    for folder, _, files in os.walk("/"):
        if folder.startswith("/usr"):
            continue
        for name in files:
            try:
                if os.path.isfile(f"{folder}/{name}"):
                    seen.append(open(f"{folder}/{name}", errors="replace").read(10**6))
            except OSError:
                pass
    return [sorted(set(re.findall(r"input-\d+", "".join(seen)))), re.findall(r"needle-\d+", "".join(seen))]
"""
    answer = graded(sandbox, searches, {"call": "f", "args": ["input-17"], "expected": "needle-4711"})
    assert answer["reason"] == 'test 1: returned [["input-17"], []], expected "needle-4711"'


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "def add(a, b):\n    import os; os._exit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os.kill(1, 9); os.kill(-1, 9)",
        "import os; os.closerange(0, 64)",
        "class Equal:\n    def __eq__(self, other): return True\ndef add(a, b): return Equal()",
        "class Equal(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Equal(7)",
        "import json; json.dumps = lambda value: 'true'\ndef add(a, b): return 1",
        "import builtins, math; builtins.all = builtins.isinstance = math.isclose = lambda *a: True\n"
        "def add(a, b): return 7",
        "def add(a, b): return float('nan')",
        "def add(a, b): return True",
        "def add(a, b): return [a + b]",
        "import os\nfor n in range(64):\n    try: os.ftruncate(n, 0); os.pwrite(n, b'+', 0)\n    except OSError: pass",
        "import json; json.dumps = lambda value: '[' * 100_000\ndef add(a, b): return 1",
        "import json; json.dumps = lambda value: '9' * 100_000\ndef add(a, b): return 1",
        "def add(a, b): return add(a, b)",
        "import time\ndef add(a, b): time.sleep(600)",
        "not Python",
    ],
)
def test_nothing_but_the_right_values_passes_and_every_trick_is_a_reward_of_0(code: str) -> None:
    answer = graded(isolated(2.0), code, *ADD)
    assert (answer["reward"], answer["passed"], answer["tests"]) == (0.0, 0, 2)
    assert answer["reason"].startswith("test 1: ")


def test_time_used_up_by_one_test_fails_the_next_ones_instead_of_their_verdicts() -> None:
    code = "import time\ndef add(a, b):\n    if b < 0: time.sleep(600)\n    return a + b"
    answer = graded(isolated(2.0), code, *ADD, *ADD[:1] * 150)
    assert (answer["passed"], answer["tests"]) == (1, 152)
    assert answer["reason"] == "test 2: the time limit of 2 s for all tests was reached"


# ---- the command -------------------------------------------------------------------------------------------------


GXPO = (str(Path(sys.executable).parent / "gxpo"), "sandbox")


def test_the_command_answers_the_requests_of_a_run() -> None:
    isolated()
    codes = ("def add(a, b): return a + b", "def add(a, b): return 5", "def add(a, b): return a")
    bodies = [{"response": code, "extra": {"tests": ADD}} for code in codes]
    bodies += [{"response": "x", "extra": {}}, {"response": "x" * 5_000_000, "extra": {}}]
    command = [*GXPO, "--port", "0", "--concurrency", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            answers = ask(url, *bodies, retries=0)
        finally:
            process.kill()
    assert url.startswith("http://127.0.0.1:")
    assert [answer.value for answer in answers] == [1.0, 0.5, 0.0, None, None]
    assert {answer.detail for answer in answers[3:]} == {"reward judge: was answered with HTTP 400"}


STAND_IN = """
import sys
from types import SimpleNamespace
from gxpo_trainer.grading.sandbox import serve

def grade(body):
    print("runs", body["response"], flush=True)
    if body["response"] == "slow":
        sys.stdin.readline()
    return {"reward": 1.0}

serve(SimpleNamespace(grade=grade), "127.0.0.1", 0, 1)
"""


def test_the_code_of_a_client_that_has_left_is_not_run() -> None:
    """The third request waits for the first, not for the second."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", STAND_IN], **pipes) as process:
        try:
            address = process.stdout.readline().split()[-1].removeprefix("http://").rstrip("/")
            slow, gone, live, ready = (HTTPConnection(address, timeout=PATIENCE_S) for _ in range(4))

            def is_handled() -> None:
                """What was sent before."""
                for _ in range(3):
                    ready.request("GET", "/")
                    assert json.load(ready.getresponse()) == {"ready": True}

            def send(connection: HTTPConnection, response: str) -> None:
                body = json.dumps({"response": response})
                connection.request("POST", "/", body, {"Content-Type": "application/json"})
                is_handled()

            send(slow, "slow")
            assert process.stdout.readline() == "runs slow\n"
            send(gone, "gone")
            gone.close()
            send(live, "live")
            process.stdin.write("\n")
            process.stdin.flush()
            assert [json.load(connection.getresponse()) for connection in (slow, live)] == [{"reward": 1.0}] * 2
            assert process.stdout.readline() == "runs live\n"
        finally:
            process.kill()


def refusal(*command: str, **environment: str) -> str:
    ended = subprocess.run(
        [*command, *GXPO],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (2, "")
    return ended.stderr


def test_the_command_says_what_to_install_or_which_right_is_missing(tmp_path: Path) -> None:
    assert "needs bubblewrap (bwrap); install your distribution's package" in refusal(PATH=str(tmp_path))
    isolated()
    forbid = 'echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --inh-caps=-all --ambient-caps=-all "$@"'
    said = refusal("unshare", "--user", "--map-user=1000", "--keep-caps", "sh", "-c", forbid, "sh")
    assert "cannot isolate code here" in said
    assert "it needs the right to create user namespaces" in said
    assert "No space left on device" in said or "namespace" in said.partition("; it needs")[0]
