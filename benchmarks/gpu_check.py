"""`make gpu-check`: run every GPU test and figure on this machine and write one page with what ran.

Each test has a process of its own, and the page is written again after each: a test that hangs or crashes costs its own
line. Parts: `learner` needs torch with CUDA, transformers, deepspeed and peft; `engines` also needs vLLM and Ray. The
exit status is 1 when a test failed, and when none ran.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.measure import RESULTS

TESTS = {
    "learner": ("tests/gpu/test_gpu.py", "tests/gpu/test_kernels.py", "tests/gpu/test_learner.py"),
    "engines": ("tests/gpu/test_engines.py",),
}
TEST_S, FIGURES_S = 1800.0, 3600.0
"""Longest time of a test, in which kernels are compiled for the first time, and of the figures."""
DISK_GIB, MEMORY_GIB = 20, 32


@dataclass(frozen=True, slots=True)
class Case:
    """One test: `passed`, `failed` or `skipped`, with the reason of the last two."""

    name: str
    outcome: str
    detail: str


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("part", nargs="?", choices=[*TESTS, "all"], default="all", help="default: all")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu-check.md", help="page to write")
    args = parser.parse_args(arguments)
    parts = list(TESTS) if args.part == "all" else [args.part]
    args.out.parent.mkdir(exist_ok=True)
    machine, problem = machine_lines()
    cases: list[Case] = []

    def write(figures: str) -> None:
        args.out.write_text(page(machine, cases, figures), encoding="utf-8")

    write("not measured yet")
    if problem is None:
        for name in (name for part in parts for name in tests_of(TESTS[part])):
            cases.append(run_test(name))
            print(f"gpu-check: {cases[-1].outcome:<8}{name}", file=sys.stderr, flush=True)
            write("not measured yet")
        write(_figures() if "learner" in parts else "")
    print(args.out.read_text(encoding="utf-8"))
    if all(case.outcome == "skipped" for case in cases):
        reasons = problem or "; ".join(sorted({case.detail for case in cases})) or "no tests were found"
        print(f"gpu-check: no test ran on a GPU: {reasons}", file=sys.stderr)
        return 1
    return int(any(case.outcome == "failed" for case in cases))


def page(machine: list[str], cases: list[Case], figures: str) -> str:
    """The page: the machine, a row for each test, figures."""
    lines = ["# GPU check", "", *(f"- {line}" for line in machine), "", "| test | outcome | detail |", "|---|---|---|"]
    lines += [f"| {case.name} | {case.outcome} | {case.detail.replace('|', '/')} |" for case in cases]
    return "\n".join([*lines, "", "```", figures.strip() or "no figures", "```", ""])


def machine_lines() -> tuple[list[str], str | None]:
    """What this machine has, with the fix of what is wrong, and why no test can run; None if they can."""
    import torch

    from gxpo_trainer.runtime.placement import driver_problem, torch_cuda, visible_gpus

    problem = None
    if not torch.cuda.is_available():
        problem = "no CUDA device is visible"
        if visible_gpus():
            problem = driver_problem() if torch_cuda() else "torch is its build for CPUs; run `make setup DEVICE=gpu`"
        problem = problem or "torch sees none of the GPUs that the driver counts; compare CUDA_VISIBLE_DEVICES"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    lines = [f"Devices: {', '.join(names) or problem}", f"torch {torch.__version__}, CUDA {torch.version.cuda}"]
    compiler = shutil.which("g++") or "missing, kernels cannot be compiled; install g++"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    headers = str(header) if header.is_file() else f"missing; install python{sysconfig.get_python_version()}-dev"
    lines.append(f"Compiler: {compiler}; Python's headers: {headers}")
    free, memory = shutil.disk_usage(".").free / 2**30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    little_disk = "" if free >= DISK_GIB else f", of which the tests may need {DISK_GIB}; free some"
    little = "" if memory >= MEMORY_GIB else f", less than the {MEMORY_GIB} that parking 1.5 B takes; use a larger host"
    return [*lines, f"Free disk: {free:.0f} GiB{little_disk}", f"Memory: {memory:.0f} GiB{little}"], problem


def tests_of(files: tuple[str, ...]) -> list[str]:
    """The ids of the tests in these files; the files themselves where they cannot be collected."""
    command = [*PYTEST, "--collect-only", *files]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return [line for line in found if "::" in line and " " not in line.partition("[")[0]] or list(files)


def run_test(name: str, limit_s: float = TEST_S) -> Case:
    """Run one test in a process group of its own, which ends with it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [*PYTEST, "--timeout=0", f"--junitxml={report}", name]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return Case(name, "failed", f"no result within {limit_s:.0f} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not report.is_file():
            return Case(name, "failed", f"the process ended with status {status} and left no report")
        element = next(ElementTree.parse(report).iter("testcase"), None)
        if element is None:
            return Case(name, "failed", "the test was not found")
        for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
            if (child := element.find(kind)) is not None:
                return Case(name, outcome, (child.get("message") or "").partition("\n")[0])
        return Case(name, "passed", "")


PYTEST = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]


def _figures() -> str:
    command = [sys.executable, "-m", "benchmarks", "gpu"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=FIGURES_S)
    except subprocess.TimeoutExpired as late:
        return f"{(late.stdout or b'').decode()}\nnot finished within {FIGURES_S:.0f} s"
    return done.stdout + done.stderr[-2000:]


if __name__ == "__main__":
    sys.exit(main())
