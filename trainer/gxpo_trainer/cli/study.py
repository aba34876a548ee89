"""`gxpo study`: execute the runs of a study, show how far it is, write its report."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gxpo_trainer.cli.arguments import Subparsers, positive

if TYPE_CHECKING:
    from gxpo_trainer.studies.definition import Study


def register(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("study", help="compare arms, each at its own best learning rate, on several seeds")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    run = actions.add_parser("run", help="state the cost, then execute the runs that are missing; may be interrupted")
    run.add_argument("--jobs", metavar="N", type=positive, default=1, help="runs at a time; default 1")
    run.set_defaults(run=run_study)
    status = actions.add_parser("status", help="runs done and missing, and the best learning rate of each arm")
    status.set_defaults(run=show_status)
    report = actions.add_parser("report", help="write the report, and the data that it is made from")
    report.add_argument(
        "--page",
        metavar="FILE",
        type=Path,
        help="a .md or .html file; default both, report.*, in the folder of the data",
    )
    report.set_defaults(run=write_report)
    answer = actions.add_parser("answer", help="print what a study found, from its data")
    answer.set_defaults(run=print_answer)
    for action in (report, answer):
        action.add_argument(
            "--data", metavar="DIR", type=Path, help="folder of the data; default: next to the study file, by its name"
        )
    for action in (run, status, report, answer):
        action.add_argument("study", metavar="STUDY.toml", type=Path, help="study file (.toml or .json)")
        if action is not answer:
            action.add_argument(
                "--out", metavar="DIR", type=Path, help="folder of its runs; default runs/studies/<name>"
            )


def run_study(args: argparse.Namespace) -> int:
    from gxpo_trainer.studies.runner import StudyRunner

    study, root = _study(args)
    show_status(args)
    # Python ends at SIGTERM without unwinding, which would leave the runs behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    StudyRunner(study, root, args.jobs, lambda line: print(line, file=sys.stderr, flush=True)).run()
    print(f"{study.name} is complete; its runs are in {root}")
    return 0


def show_status(args: argparse.Namespace) -> int:
    from gxpo_trainer.studies.expansion import best_rate, largest_cost
    from gxpo_trainer.studies.runner import read_results

    study, root = _study(args)
    results = read_results(study, root)
    runs, passes = largest_cost(study)
    print(f"{study.name}: {len(results)} runs done of at most {runs}; at most {passes} backward passes in all")
    for name, arm in study.arms.items():
        rate = best_rate(study, name, results)
        done = sum(key.stage == "report" and key.arm == name for key in results)
        found = "not tuned yet" if rate is None else f"best learning rate {rate:g}"
        print(f"  {arm.label}: {found}, {done} of {len(study.seeds)} seeds done")
    return 0


def write_report(args: argparse.Namespace) -> int:
    """Collect the runs where there are any, else read the data collected before; write the page and its pictures."""
    from gxpo_trainer.studies import data as study_data
    from gxpo_trainer.studies import report

    study, root = _study(args)
    folder = args.data or args.study.with_suffix("")
    if root.exists():
        study_data.write(study_data.collect(study, root), folder)
    pages = [args.page] if args.page else [folder / "report.md", folder / "report.html"]
    report.write_report(study_data.read(folder), *pages)
    print(f"Data: {folder}\nReport: {' and '.join(map(str, pages))}")
    return 0


def print_answer(args: argparse.Namespace) -> int:
    """What the report of the collected data concludes, in plain text."""
    import textwrap

    from gxpo_trainer.studies import data as study_data
    from gxpo_trainer.studies.findings import find
    from gxpo_trainer.studies.report import conclusion

    data = study_data.read(args.data or args.study.with_suffix(""))
    findings = find(data)
    lines = ["Incomplete: the baseline lacks seeds."] if findings is None else conclusion(data, findings)
    for line in lines:
        print(textwrap.fill(line, 110, initial_indent="- ", subsequent_indent="  "))
    return 0


def _study(args: argparse.Namespace) -> tuple[Study, Path]:
    from gxpo_trainer.studies.definition import load_study

    study = load_study(args.study)
    return study, args.out or Path("runs") / "studies" / study.name
