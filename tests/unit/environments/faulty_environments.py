"""Environments that fail in every way that a process can; the action names the way."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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

    def _sleep(self) -> Turn:
        time.sleep(600)
        return Turn()

    def _spin(self) -> Turn:
        while True:
            pass

    def _stop(self) -> Turn:
        os.kill(os.getpid(), signal.SIGSTOP)
        return Turn("continued")

    def _exit(self) -> Turn:
        os._exit(7)

    def _quit(self) -> Turn:
        sys.exit("bye")

    def _segfault(self) -> Turn:
        ctypes.string_at(0)
        return Turn()

    def _kill_itself(self) -> Turn:
        os.kill(os.getpid(), signal.SIGKILL)
        return Turn()

    def _kill_parent(self) -> Turn:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
        return Turn()

    def _stop_parent(self) -> Turn:
        os.kill(os.getppid(), signal.SIGSTOP)
        return Turn("stopped it")

    def _eat_memory(self) -> Turn:
        eaten = []
        while True:
            eaten.append(bytearray(1 << 24))

    def _long(self) -> Turn:
        return Turn("x" * 10_000_000)

    def _none(self) -> Turn:
        return None  # type: ignore[return-value]

    def _surrogate(self) -> Turn:
        return Turn("\ud83d")

    def _nan(self) -> Turn:
        return Turn("", reward=float("nan"))

    def _raise(self) -> Turn:
        raise ValueError("no such tool")

    def _print(self) -> Turn:
        print('{"observation": "printed", "reward": 100.0, "done": true}', flush=True)
        sys.stderr.write("noise" * 100_000)
        os.write(1, b'{"failure": "printed"}\n')
        return Turn(f"printed to {Path('/proc/self/fd/1').readlink()}")

    def _write_to_all_descriptors(self) -> Turn:
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, b"garbage\n")
            except OSError:
                continue
        return Turn("wrote")

    def _flood_all_descriptors(self) -> Turn:
        for descriptor in range(3, 64):
            try:
                while True:
                    os.write(descriptor, b"x" * 65536)
            except OSError:
                continue
        return Turn("wrote")

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

    def _leave_children_and_exit(self) -> Turn:
        self._leave_children()
        os._exit(0)

    def _done(self) -> Turn:
        return Turn("over", reward=0.5, done=True)


class Forgetful(Counter):
    """Another first observation in each process."""

    def reset(self, problem: Problem, seed: int) -> Observation:
        super().reset(problem, seed)
        return Observation.of_text(f"process {os.getpid()}")


class Drifting(Counter):
    """Another turn in each process."""

    def step(self, action: str) -> Turn:
        return Turn(f"process {os.getpid()}")


class NoMessages:
    def reset(self, problem: Problem, seed: int) -> Observation:
        return Observation(())

    def step(self, action: str) -> Turn:
        return Turn()


class LongReset(NoMessages):
    def reset(self, problem: Problem, seed: int) -> Observation:
        return Observation.of_text("x" * 10_000_000)


class ManyMessages(NoMessages):
    def reset(self, problem: Problem, seed: int) -> Observation:
        return Observation(({"role": "user", "content": ""},) * 500_000)


class TextReset(NoMessages):
    def reset(self, problem: Problem, seed: int) -> Observation:
        return problem.text  # type: ignore[return-value]


class FailingConstructor(NoMessages):
    def __init__(self) -> None:
        raise RuntimeError("no display")


class NoStep:
    def reset(self, problem: Problem, seed: int) -> Observation:
        return Observation.of_text("")


class WrongStep(NoStep):
    def step(self) -> Turn:
        return Turn()


class AsynchronousStep(NoStep):
    async def step(self, action: str) -> Turn:
        return Turn()


class NeedsArguments(NoMessages):
    def __init__(self, address: str) -> None:
        self.address = address


NOT_A_CLASS = 3


class TextStep(Counter):
    def step(self, action: str) -> Turn:
        return "fine"  # type: ignore[return-value]


class RaisingStep(Counter):
    def step(self, action: str) -> Turn:
        raise ValueError(f"{action} is no move")
