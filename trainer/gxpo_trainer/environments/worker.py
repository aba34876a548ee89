"""The process that forks episodes: `python -m gxpo_trainer.environments.worker PARENT SETTINGS`.

It imports the environment's class once and little else, so that it starts in tenths of a second and an episode's
process in milliseconds. SETTINGS is the JSON of EnvironmentConfig. Messages are JSON datagrams on a socket, which is
its standard input. In: one for each episode, with the file descriptors of its two sockets. Out: `{"ready": true}`, or
`{"refused": why}`. Of the two sockets one is for the process of the episode. By the other this process tells its id, as
a line, and how it ended; when the other end is closed, the episode is killed.

An episode leads a session and adopts the orphans among its descendants; this process adopts those of the episodes.
When an episode ends, its process group is killed, and then every child that is no episode, until none is left. So
nothing of an episode outlives it, and the other end of its socket reads end-of-file. When this process's input ends,
all episodes are killed. When this process is killed, the kernel kills the episodes.

The process of an episode creates the environment and answers its calls, one JSON line each, on a socket. In:
`{"problem": …, "seed": …}` once, then `{"action": …}`. Out: the answer's fields, or
`{"failure": "what went wrong"}`. The environment's standard streams are /dev/null: what it prints does not reach
the socket. An agent's process gets one line there, and answers over HTTP (gateway.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit
from urllib.request import build_opener

from gxpo_trainer.environments.contract import (
    MAX_MESSAGE,
    Environment,
    EnvironmentFailed,
    Problem,
    checked_observation,
    checked_turn,
)
from gxpo_trainer.environments.loading import AGENT, load_agent, load_environment
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.grading.pool import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    die_with_parent,
    limit_process,
    prctl,
    redirect_to_null,
)

OUT_OF_MEMORY = "out of memory (environment.memory_mb)"
SUCCESS = "ended with exit code 0"
"""Cause of the end of a process."""
_MAX_DETAIL = 500
MAX_FILES = 4096
"""Open files and connections of each process of an agent, so that none takes those of the gateway."""


def serve_episode(channel: socket.socket, create: Callable[[], Environment], name: str) -> int:
    """Answer calls until the other end is closed; the exit code. name: of the class, for messages."""
    environment: Environment | None = None
    for line in channel.makefile("rb"):
        try:
            request = json.loads(line)
            if environment is None:
                environment = _call(create, f"{name}.__init__")
            if "action" in request:
                turn = _call(partial(environment.step, request["action"]), f"{name}.step")
                reply = asdict(checked_turn(turn, name))
            else:
                reset = partial(environment.reset, Problem(**request["problem"]), request["seed"])
                reply = asdict(checked_observation(_call(reset, f"{name}.reset"), name))
        except EnvironmentFailed as error:
            reply = {"failure": str(error)[:_MAX_DETAIL]}
        except MemoryError:
            reply = {"failure": OUT_OF_MEMORY}
        channel.sendall(json.dumps(reply).encode() + b"\n")
    return 0


def _call(function: Callable[[], Any], name: str) -> Any:
    """The function's result. Raises MemoryError, and EnvironmentFailed for any other exception."""
    try:
        return function()
    except (MemoryError, EnvironmentFailed):
        raise
    except BaseException as error:  # third-party code may raise anything, also SystemExit
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)  # reads no file
        place = f"{Path(frame.f_code.co_filename).name}:{line}"
        raise EnvironmentFailed(f"{name} raised {type(error).__name__}: {str(error)[:300]} ({place})") from error


def play_agent(
    channel: socket.socket, settings: Mapping[str, Any], function: Callable[[dict[str, Any]], Any] | None
) -> int:
    """Run the agent until it ends; its exit code. A command takes the place of this process.

    channel: the problem with address and key comes first, as a line of JSON; then it is the agent's standard error.
    settings: those of AgentConfig. function: what `environment.function` names.
    """
    with channel, channel.makefile("rb") as lines:
        given = json.loads(lines.readline())
        os.dup2(channel.fileno(), 2)
    files = min(MAX_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    os.environ |= {"OPENAI_BASE_URL": given["base_url"], "OPENAI_API_KEY": given["api_key"]}
    try:
        if settings["url"]:
            _post(settings["url"], given)
        elif function is not None:
            if inspect.isawaitable(result := function(given["problem"])):
                asyncio.run(result)  # type: ignore[arg-type]
        else:
            problem = os.memfd_create("problem")
            os.write(problem, json.dumps(given["problem"]).encode())
            os.lseek(problem, 0, os.SEEK_SET)
            os.dup2(problem, 0)
            os.execvp(settings["command"][0], settings["command"])
        return 0
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return 0
        traceback.print_exc()
        return 1
    finally:
        sys.stderr.flush()


def _post(address: str, given: Mapping[str, Any]) -> None:
    """Have a running agent play the episode; its answer is the end."""
    url = urlsplit(address)
    connection = (HTTPSConnection if url.scheme == "https" else HTTPConnection)(url.netloc)  # follows no redirect
    connection.request("POST", url.path or "/", json.dumps(given), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if not 200 <= response.status < 300:
        raise RuntimeError(f"{address} answers {response.status} {response.reason}")
    response.read()


def _ask_once(client: Any) -> None:
    """A request by Python's own client, and one by OpenAI's if it is given; a thread here answers."""
    body = b'{"id": "", "object": "chat.completion", "created": 0, "model": "", "choices": []}'
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"

    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(MAX_MESSAGE)
            connection.sendall(head.encode() + body)

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        asking: list[Callable[[], Any]] = [lambda: json.load(build_opener().open(address, b"{}", timeout=5))]
        if client is not None:
            new = partial(client.OpenAI, base_url=address, api_key="-", timeout=5, max_retries=0)
            asking.append(lambda: new().chat.completions.create(model="", messages=[]))
        for ask in asking:
            thread = threading.Thread(target=answer, args=(server,))
            thread.start()
            try:
                ask()
            finally:  # no thread is left when the first episode is forked
                thread.join()


class EpisodeForker:
    """Forks and reaps the processes of episodes. play: what such a process does with its socket; its exit code."""

    def __init__(self, control: socket.socket, play: Callable[[socket.socket], int]) -> None:
        self._control, self._play = control, play
        self._lives: dict[int, socket.socket] = {}
        """By process id."""
        self._poll = select.epoll()
        self._wake, wake = os.pipe()
        for end in (self._wake, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def run(self) -> None:
        """Serve until the input ends, then kill everything."""
        self._poll.register(self._control, select.EPOLLIN)
        self._poll.register(self._wake, select.EPOLLIN)
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wake:
                    os.read(self._wake, MAX_MESSAGE)
                elif descriptor != self._control.fileno():
                    self._poll.unregister(descriptor)
                    pids = [pid for pid, life in self._lives.items() if life.fileno() == descriptor]
                    os.kill(pids[0], signal.SIGKILL)  # not reaped yet, so the id is still its own
                elif not self._start():
                    self._kill_all()
                    return
            self._reap()

    def _start(self) -> bool:
        """Fork an episode; False at the end of the input."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 2, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            return False
        if not data:
            return False
        parent, life = os.getpid(), socket.socket(fileno=descriptors[1])
        try:
            pid = os.fork()
        except OSError as error:
            _tell(life, f"cannot be started: {error}")
        else:
            if pid == 0:
                self._become_episode(descriptors[0], life, parent)
            self._lives[pid] = life
            self._poll.register(life, 0)  # for its end alone
            with contextlib.suppress(ConnectionError):  # the host may need it no longer
                life.sendall(f"{pid}\n".encode())
        os.close(descriptors[0])
        return True

    def _become_episode(self, descriptor: int, life: socket.socket, parent: int) -> NoReturn:
        code = 1
        try:
            os.setsid()
            die_with_parent(parent)
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for ours in (self._control, life, *self._lives.values()):
                ours.close()
            redirect_to_null(0, 1, 2)
            code = self._play(socket.socket(fileno=descriptor))
        finally:
            os._exit(code)

    def _reap(self) -> None:
        """Report the episodes that have ended, and kill what they left."""
        while (ended := _ended_child()) is not None:
            if (life := self._lives.pop(ended.si_pid, None)) is not None:
                _kill_group(ended.si_pid)  # before it is reaped, so that the id is still its own
                with contextlib.suppress(FileNotFoundError):  # the host has closed its end before
                    self._poll.unregister(life)  # closing is not enough: a process just forked may still hold it
                _tell(life, _cause(ended))
            os.waitpid(ended.si_pid, 0)
            # Orphans of ended episodes; their children become ours, and come here when they are reaped.
            for pid in set(_children()) - set(self._lives):
                os.kill(pid, signal.SIGKILL)

    def _kill_all(self) -> None:
        for pid in self._lives:
            _kill_group(pid)
        self._lives.clear()
        while children := _children():
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(children[0], 0)


def _tell(life: socket.socket, cause: str) -> None:
    with life, contextlib.suppress(ConnectionError):
        life.sendall(cause.encode())


def _ended_child() -> Any:
    """A child that has ended and is not reaped yet; None without one."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


def _children() -> list[int]:
    """Process ids of our children, whether or not they have ended."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _kill_group(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # killed before it became the leader of its group
        return


def _cause(ended: Any) -> str:
    if ended.si_code == os.CLD_EXITED:
        return f"ended with exit code {ended.si_status}"
    return f"was killed by signal {ended.si_status} ({signal.strsignal(ended.si_status)})"


def main(arguments: list[str]) -> int:
    parent, settings = int(arguments[0]), json.loads(arguments[1])
    die_with_parent(parent)
    limit_process(settings["memory_mb"])
    control = socket.socket(fileno=os.dup(0))
    redirect_to_null(0)  # what the class starts when it is imported must not hold the socket
    try:
        play = (
            partial(play_agent, settings=settings, function=load_agent(settings))
            if settings["name"] == AGENT
            else partial(serve_episode, create=load_environment(settings), name=settings["name"])
        )
    except ConfigError as error:
        control.send(json.dumps({"refused": str(error)[: MAX_MESSAGE // 8]}).encode())
        return error.exit_code
    if settings["name"] == AGENT:
        # A first request loads modules: here once and not in each episode (370 ms with OpenAI's client).
        with contextlib.suppress(Exception):  # a machine without loopback, another version of the client
            _ask_once(sys.modules.get("openai"))
    prctl(PR_SET_PDEATHSIG, 0)  # the end of the input is noticed, and the episodes are killed first
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    gc.freeze()
    forker = EpisodeForker(control, play)
    control.send(b'{"ready": true}')
    forker.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
