"""Environments that fail in every way that a process can; the action names the way."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from gxpo_trainer.environments import Observation, Problem, Turn

STRAYS = [sys.executable, "-c", "import time; time.sleep(600)"]


class Counter:
    """Answers an ordinary turn with its number and the process's id."""

    def reset(self, problem: Problem, seed: int) -> Observation:
        self.turns = 0
        return Observation.of_text(f"{problem.text} with seed {seed}")

    def step(self, action: str) -> Turn:
        self.turns += 1
        fault = getattr(self, f"_{action}", None)
        return fault() if fault is not None else Turn(f"turn {self.turns}: {action}")

    def _sleep(self) -> None:
        time.sleep(600)

    def _stop(self) -> Turn:
        os.kill(os.getpid(), signal.SIGSTOP)
        return Turn("continued")

    def _quit(self) -> NoReturn:
        sys.exit("bye")

    def _kill_itself(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _kill_parent(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    def _stop_parent(self) -> Turn:
        os.kill(os.getppid(), signal.SIGSTOP)
        return Turn("stopped it")

    def _eat_memory(self) -> NoReturn:
        eaten = []
        while True:
            eaten.append(bytearray(1 << 24))

    def _long(self) -> Turn:
        return Turn("x" * 10_000_000)

    def _none(self) -> None: ...

    def _surrogate(self) -> Turn:
        return Turn("\ud83d")

    def _nan(self) -> Turn:
        return Turn("", reward=float("nan"))

    def _huge(self) -> Turn:
        return Turn("", reward=10**5000)

    def _print(self) -> Turn:
        print('{"observation": "printed", "reward": 100.0, "done": true}', flush=True)
        sys.stderr.write("noise" * 100_000)
        os.write(1, b'{"failure": "printed"}\n')
        return Turn(f"printed to {Path('/proc/self/fd/1').readlink()}")

    def _write_to_all_descriptors(self, text: bytes = b"garbage\n", times: int = 1) -> Turn:
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                for _ in range(times):
                    os.write(descriptor, text)
        return Turn("wrote")

    def _flood_all_descriptors(self) -> Turn:
        return self._write_to_all_descriptors(b"x" * 65536, 1 << 30)

    def _leave_children(self) -> Turn:
        """A child of each kind: of the same group, of its own session, an orphan, a fork that holds the socket."""
        subprocess.Popen(STRAYS)
        subprocess.Popen(STRAYS, start_new_session=True)
        if (parent := os.fork()) == 0:
            subprocess.Popen(STRAYS, start_new_session=True)
            os._exit(0)
        os.waitpid(parent, 0)  # else it could be counted in place of the orphan
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        return Turn("left")

    def _leave_children_and_exit(self) -> NoReturn:
        self._leave_children()
        os._exit(7)

    def _done(self) -> Turn:
        return Turn("over", reward=0.5, done=True)


class Forgetful(Counter):
    """Another first observation in each process."""

    def reset(self, problem: Problem, seed: int) -> Observation:
        super().reset(problem, seed)
        return Observation.of_text(f"process {os.getpid()}")


class NoMessages:
    first: Any = Observation(())

    def reset(self, problem: Problem, seed: int) -> Observation:
        return self.first

    def step(self, action: str) -> Turn:
        return Turn()


class LongReset(NoMessages):
    first = Observation.of_text("x" * 10_000_000)


class ManyMessages(NoMessages):
    first = Observation(({"role": "user", "content": ""},) * 500_000)


class TextReset(NoMessages):
    first = "text"


class FailingConstructor(NoMessages):
    def __init__(self) -> None:
        raise RuntimeError("no display")


class NoStep:
    def reset(self, problem: Problem, seed: int) -> Observation:
        return Observation.of_text("")


class TextStep(Counter):
    def step(self, action: str) -> Turn:
        return "fine"  # type: ignore[return-value]


class RaisingStep(Counter):
    def step(self, action: str) -> Turn:
        raise ValueError(f"{action} is no move")
