"""`make gpu-check`: run every GPU test and figure on this machine and write one page with what ran.

Parts: `learner` needs torch with CUDA, transformers, deepspeed and peft; `engines` also needs vLLM and Ray. The exit
status is 1 when a test failed, and when none ran.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.measure import RESULTS

TESTS = {"learner": ("tests/gpu/test_gpu.py", "tests/gpu/test_learner.py"), "engines": ("tests/gpu/test_engines.py",)}


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
    cases = [case for part in parts for case in _run(TESTS[part])]
    figures = _figures() if "learner" in parts else ""
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(page(_devices(), cases, figures), encoding="utf-8")
    print(args.out.read_text(encoding="utf-8"))
    if all(case.outcome == "skipped" for case in cases):
        reasons = "; ".join(sorted({case.detail for case in cases}))
        print(
            f"gpu-check: no test ran on a GPU ({reasons}); run `make setup DEVICE=gpu` on a GPU machine",
            file=sys.stderr,
        )
        return 1
    return int(any(case.outcome == "failed" for case in cases))


def page(devices: str, cases: list[Case], figures: str) -> str:
    """The page: devices, a row for each test, figures."""
    lines = ["# GPU check", "", f"Devices: {devices}.", "", "| test | outcome | detail |", "|---|---|---|"]
    lines += [f"| {case.name} | {case.outcome} | {case.detail.replace('|', '/')} |" for case in cases]
    return "\n".join([*lines, "", "```", figures.strip() or "no figures", "```", ""])


def cases_of(report: Path) -> list[Case]:
    """The tests of a JUnit report."""
    cases = []
    for element in ElementTree.parse(report).iter("testcase"):
        outcome, detail = "passed", ""
        for kind, name in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
            child = element.find(kind)
            if child is not None:
                outcome, detail = name, (child.get("message") or "").splitlines()[0] if child.get("message") else ""
        cases.append(Case(str(element.get("name")), outcome, detail))
    return cases


def _run(files: tuple[str, ...]) -> list[Case]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
        subprocess.run(command, check=False)
        return cases_of(report) if report.is_file() else [Case(", ".join(files), "failed", "pytest did not run")]


def _figures() -> str:
    done = subprocess.run([sys.executable, "-m", "benchmarks", "gpu"], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr[-2000:]


def _devices() -> str:
    import torch

    count = torch.cuda.device_count()
    return ", ".join(torch.cuda.get_device_name(index) for index in range(count)) or "none visible to torch"


if __name__ == "__main__":
    sys.exit(main())
