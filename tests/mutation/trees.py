"""Copies of the checkout in which tests meet mutants.

Importing torch costs more than most tests do, so a mutant is tested in a fork of a process that has imported torch and
the like; the fork imports the mutated module itself.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

from mutation.mutants import ROOT

SOURCES = ("client", "trainer", "services", "dashboard")
# No mutant of a pure module is noticed by these alone, and they take minutes.
SLOW_TESTS = ("test_verifier_pool.py", "test_installed_rule.py", "test_plugins.py")
WARM = ("torch._dynamo", "torch.utils._python_dispatch", "scipy.stats", "sympy", "latex2sympy2_extended", "fastapi")
WARM += ("sqlalchemy", "pydantic_settings", "pandas", "httpx", "rich.table", "structlog", "deepspeed")
PYTEST = ["-x", "-q", "-m", "not engine", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
PYTEST += ["--hypothesis-profile=mutants", "-p", "_hypothesis_pytestplugin", "-p", "pytest_timeout"]
PYTEST += ["-p", "xdist.plugin"]


def test_files(path: str) -> list[str]:
    """Unit tests of the mutated file's package, those of its own name first, then all others that name the package, or
    the service's whole app."""
    source = Path(path)
    package = source.parts[1:-1] if len(source.parts) > 3 else (*source.parts[1:-1], source.stem)
    folder = ROOT.joinpath("tests/unit", *source.parts[:1] if source.parts[0] == "services" else (), *package[1:])
    names = (".".join(package), *(["gxpo_services.app"] if source.parts[0] == "services" else []))
    every = [p for p in ROOT.glob("tests/unit/**/test_*.py") if p.name not in SLOW_TESTS]
    files = [p for p in every if p.is_relative_to(folder) or any(name in p.read_text() for name in names)]
    files.sort(key=lambda p: (not p.is_relative_to(folder), source.stem not in p.stem, p))
    return [str(p.relative_to(ROOT)) for p in files]


class Tree:
    """One copy; make it in a process of its own, for it decides where modules come from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seconds: dict[tuple[str, ...], float] = {}
        shutil.rmtree(folder, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        paths = [str(folder / name) for name in SOURCES]
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        # Bytecode knows its source's time in whole seconds: that of one mutant would be taken for the next one's.
        sys.dont_write_bytecode = True
        os.chdir(folder)
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutants", phases=phases, deadline=None)

    def outcome(self, path: str, source: str) -> str:
        """survived, killed or timeout, with `source` in place of the file `path`; tests named after it come first."""
        names = test_files(path)
        own = [name for name in names if Path(path).stem in Path(name).stem]
        parts = [tuple(part) for part in (own, [name for name in names if name not in own]) if part]
        limits = {part: 15 + 5 * self._original_s(part) for part in parts}
        target, original = self.folder / path, (ROOT / path).read_text()
        target.write_text(source)
        try:
            outcomes = (self._run(part, limits[part]) for part in parts)
            return next((outcome for outcome in outcomes if outcome != "survived"), "survived")
        finally:
            target.write_text(original)

    def _original_s(self, names: tuple[str, ...]) -> float:
        """CPU seconds of tests on the original, which must pass."""
        if names not in self._seconds:
            before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
            if self._run(names, 3600) != "survived":
                log = self.folder.with_suffix(".log").read_text()
                raise SystemExit(f"a test fails on the original:\n{log[-3000:]}")
            self._seconds[names] = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
        return self._seconds[names]

    def _run(self, names: tuple[str, ...], cpu_s: float) -> str:
        def test() -> None:
            os._exit(pytest.main([*PYTEST, "--rootdir", str(self.folder), *names]))

        code = limited_fork(test, cpu_s, self.folder.with_suffix(".log"))
        if code == 99:
            raise SystemExit("a test process failed")
        return {0: "survived", -signal.SIGXCPU: "timeout", -signal.SIGKILL: "timeout"}.get(code, "killed")


def limited_fork(run: Callable[[], object], cpu_s: float, log: Path) -> int:
    """Exit code of `run` in a fork, or minus the signal that ended it.

    Its limit is CPU time, which other processes do not use up; the clock only ends what waits for ever.
    """
    child = os.fork()
    if child:
        end = time.monotonic() + 60 + 30 * cpu_s
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(ended[1] if ended[0] else os.waitpid(child, 0)[1])
    try:
        os.setsid()
        seconds = int(cpu_s + time.process_time()) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        run()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(99)
