"""Copies of the checkout in which tests meet mutants.

Importing torch and collecting tests cost more than most tests do. So one pytest session collects all tests once, and
each mutant is tested in a fork of it, where the function's code object is replaced. A mutant outside of functions needs
its module imported again: it gets a session of its own, in a fork of a process that has imported torch and the like.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import hypothesis
import pytest

from mutation.mutants import ROOT, target_files

SOURCES = ("client", "trainer", "services", "dashboard")
# No mutant of a pure module is noticed by these alone, and they take minutes.
SLOW_TESTS = ("test_verifier_pool.py", "test_installed_rule.py", "test_plugins.py")
WARM = ("torch._dynamo", "torch.utils._python_dispatch", "scipy.stats", "sympy", "latex2sympy2_extended", "fastapi")
WARM += ("sqlalchemy", "pydantic_settings", "pandas", "httpx", "rich.table", "structlog", "deepspeed")
PYTEST = [
    "-x",
    "-q",
    "-s",
    "-m",
    "not engine",
    "-p",
    "no:cacheprovider",
    "--hypothesis-seed=0",
    "--hypothesis-profile=mutants",
]
PYTEST += ["-p", "_hypothesis_pytestplugin", "-p", "pytest_timeout", "-p", "xdist.plugin"]


def test_files(path: str) -> list[str]:
    """Unit tests of the mutated file's package, those of its own name first, then all others that name the package."""
    source = Path(path)
    package = source.parts[1:-1] if len(source.parts) > 3 else (*source.parts[1:-1], source.stem)
    folder = ROOT.joinpath("tests/unit", *source.parts[:1] if source.parts[0] == "services" else (), *package[1:])
    name = ".".join(package)
    every = [p for p in ROOT.glob("tests/unit/**/test_*.py") if p.name not in SLOW_TESTS]
    files = [p for p in every if p.is_relative_to(folder) or name in p.read_text()]
    files.sort(key=lambda p: (not p.is_relative_to(folder), source.stem not in p.stem, p))
    return [str(p.relative_to(ROOT)) for p in files]


@dataclass
class Calls:
    """What tests call: function (path:qualified name) → its tests, and the CPU seconds of each test."""

    tests_of: dict[str, list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, other: Calls) -> None:
        self.seconds |= other.seconds
        for function, tests in other.tests_of.items():
            self.tests_of.setdefault(function, []).extend(tests)

    def of_file(self, name: str) -> Calls:
        def inside(test: str) -> bool:
            return test.startswith(f"{name}::")

        tests_of = {function: [*filter(inside, tests)] for function, tests in self.tests_of.items()}
        seconds = {test: value for test, value in self.seconds.items() if inside(test)}
        return Calls({function: tests for function, tests in tests_of.items() if tests}, seconds)


class Tree:
    """One copy; make it in a process of its own, for it decides where modules come from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder.with_suffix(".log")
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

    def session(self, files: list[str], work: Callable[[Session], None]) -> None:
        """Collect the test files in this process and call `work` with them."""
        os.chdir(self.folder)
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutants", phases=phases, deadline=None)
        plugin = Session(self, work)
        code = pytest.main([*PYTEST, "--rootdir", str(self.folder), *files], plugins=[plugin])
        if not plugin.collected:
            raise SystemExit(f"pytest could not collect the tests: {code}")

    def outcome_in_new_session(self, path: str, source: str, tests: list[str], cpu_s: float) -> str:
        """`Session.outcome` for a module that must be imported again. Call it before any session.

        The tests named after the module come first, alone: importing the others costs more than running them.
        """
        target, original = self.folder / path, (self.folder / path).read_text()
        times, files = target.stat(), list(dict.fromkeys(test.split("::")[0] for test in tests))
        own = [name for name in files if target.stem in Path(name).stem]
        target.write_text(source)

        def test(names: list[str]) -> None:
            chosen = [test for test in tests if test.split("::")[0] in names]
            with contextlib.suppress(SystemExit):
                self.session(names, lambda session: os._exit(session.run(chosen)))
            os._exit(2)  # the mutant cannot be imported

        try:
            outcomes = (
                _outcome(limited_fork(lambda names=names: test(names), cpu_s, self.log))  # type: ignore[misc]
                for names in (own, [name for name in files if name not in own])
                if names
            )
            return next((outcome for outcome in outcomes if outcome != "survived"), "survived")
        finally:
            target.write_text(original)
            os.utime(target, (times.st_atime, times.st_mtime))


_CACHE = functools._lru_cache_wrapper


class Session:
    """pytest plugin: hands the collected tests over instead of running them."""

    def __init__(self, tree: Tree, work: Callable[[Session], None]) -> None:
        self.tree = tree
        self.collected = False
        self._work = work

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.collected = True
        self._session = session
        self._items = {item.nodeid: item for item in session.items}
        self._targets = {str(self.tree.folder / p.relative_to(ROOT)): p.relative_to(ROOT) for p in target_files()}
        modules = [".".join(path.with_suffix("").parts[1:]) for path in self._targets.values()]
        for module in modules:
            importlib.import_module(module)
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = {}
        self._caches: list[Any] = []
        for item in gc.get_objects():
            if isinstance(item, FunctionType) and (code := item.__code__).co_filename in self._targets:
                self._functions.setdefault(_identity(code), []).append(item)
            elif type(item) is _CACHE and item.__module__ in modules:
                self._caches.append(item)
        self._work(self)
        return True

    def run(self, tests: list[str]) -> int:
        """0 when all of them pass; ends with the first that does not."""
        chosen = [self._items[name] for name in tests]
        for item, following in zip(chosen, [*chosen[1:], None], strict=True):
            self._session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._session.testsfailed:
                return 1
        return 0

    def outcome(self, path: str, source: str, tests: list[str], cpu_s: float) -> str:
        """survived, killed or timeout: `tests` with the functions of `source` in place of those of the file `path`."""

        def test() -> None:
            name = str(self.tree.folder / path)
            old, new = (_functions(compile(text, name, "exec")) for text in ((ROOT / path).read_text(), source))
            changed = [key for key in new if new[key] != old[key]]
            if not changed or not all(key in self._functions for key in changed):
                os._exit(98)
            for key in changed:
                for function in self._functions[key]:
                    function.__code__ = new[key]
            os._exit(self.run(tests))

        return _outcome(limited_fork(test, cpu_s, self.tree.log))

    def record(self) -> Calls:
        """Run every test on the original and note which functions of the targets it calls; all must pass."""
        results = self.tree.folder / "calls.json"

        def run() -> None:
            calls, failed = Calls(), 0
            for name in self._items:
                for cache in self._caches:  # else a cached function has one caller, the first
                    cache.cache_clear()
                with self._traced() as seen:
                    start = time.process_time()
                    failed = failed or self.run([name])
                    calls.seconds[name] = time.process_time() - start
                for code in seen:
                    key = f"{self._targets[code.co_filename]}:{code.co_qualname}"
                    calls.tests_of.setdefault(key, []).append(name)
            results.write_text(json.dumps(vars(calls)))
            os._exit(failed)

        if limited_fork(run, 3600, self.tree.log):
            raise SystemExit(f"a test fails on the original:\n{self.tree.log.read_text()[-3000:]}")
        return Calls(**json.loads(results.read_text()))

    @contextlib.contextmanager
    def _traced(self) -> Iterator[set[CodeType]]:
        seen: set[CodeType] = set()

        def trace(frame: Any, event: str, argument: Any) -> None:
            if frame.f_code.co_filename in self._targets:
                seen.add(frame.f_code)

        sys.settrace(trace)
        try:
            yield seen
        finally:
            sys.settrace(None)


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


def _outcome(code: int) -> str:
    if code in (98, 99):
        raise SystemExit({98: "the mutated function is not in the session", 99: "a test process failed"}[code])
    return {0: "survived", -signal.SIGXCPU: "timeout", -signal.SIGKILL: "timeout"}.get(code, "killed")


def _functions(code: CodeType) -> dict[tuple[str, str, int], CodeType]:
    """The functions and methods of a module's code; those inside a function are part of it."""
    functions = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            is_function = inner.co_flags & 1  # CO_OPTIMIZED: the body of a class is not
            functions |= {_identity(inner): inner} if is_function else _functions(inner)
    return functions


def _identity(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno
