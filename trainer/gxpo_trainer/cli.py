"""The `gxpo` command, and its commands that work without a service.

Each package registers its commands in the entry-point group `gxpo.commands`; an entry point is a function
`register(subparsers)` that adds commands and sets the default `run` of each to a function `run(args) -> int | None`.
Arguments are parsed before heavy modules are imported: a command imports what it needs when it runs.

Exit codes: 0 success, 1 failure, 2 invalid usage, config or data, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from gxpo_trainer import __version__
from gxpo_trainer.errors import CheckpointError, ConfigError, DataError, GxpoError

if TYPE_CHECKING:
    from gxpo_trainer.config import RunConfig
    from gxpo_trainer.planner.inputs import ModelShape
    from gxpo_trainer.studies.data import StudyData
    from gxpo_trainer.studies.definition import Results, Study

COMMAND_GROUP = "gxpo.commands"


class _Parser(argparse.ArgumentParser):
    """Says of arguments that a command does not have how the command is used; argparse shows all commands."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, others = super().parse_known_args(args, namespace)
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return known, others


def build_parser() -> argparse.ArgumentParser:
    """The parser with the commands of every installed package."""
    parser = _Parser(
        prog="gxpo", description="Post-train language models on verifiable problems with GRPO, SFPO and GXPO."
    )
    parser.add_argument("--version", action="version", version=f"gxpo {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for entry in entry_points(group=COMMAND_GROUP):
        entry.load()(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except GxpoError as error:
        print(f"gxpo: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("gxpo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe (`gxpo config … | head`) has exited; prevent a failing flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


Subparsers = Any  # argparse._SubParsersAction, which has no public name


_SET = argparse.ArgumentParser(add_help=False)
_SET.add_argument("--set", metavar="A.B=C", action="append", default=[], help="override a setting; repeatable")


def names(text: str) -> tuple[str, ...]:
    listed = tuple(name.strip() for name in text.split(",") if name.strip())
    if not listed:
        raise argparse.ArgumentTypeError("must contain at least one name")
    return listed


def _number(kind: type[int] | type[float], accepts: Callable[[float], bool], words: str) -> Callable[[str], float]:
    """Argument type of the numbers that `accepts` accepts."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if accepts(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text}: must be {words}")

    return parse


positive = _number(int, lambda value: value >= 1, "a whole number of at least 1")
share = _number(float, lambda value: 0 <= value < 1, "a number from 0 up to, not including, 1")
positive_seconds = _number(float, lambda value: 0 < value <= 1e6, "a number of seconds above 0, at most 1,000,000")


def register_sft(subparsers: Subparsers) -> None:
    """`gxpo train` on completions; a plain optimizer step unless the run file names a rule."""
    parser = register_train(subparsers, "sft", "fine-tune a policy on completions (supervised)")
    parser.set_defaults(supervised=True)


def register_train(
    subparsers: Subparsers, name: str = "train", words: str = "train a policy on this machine or a Ray cluster"
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(name, parents=[_SET], help=words)
    parser.add_argument("config", metavar="RUN.toml", type=Path, help="run file (.toml or .json)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="output folder; default runs/<name>")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="resume from the last checkpoint in the output folder")
    resume = "resume if the output folder contains a run, else start"
    start.add_argument("--continue", dest="continue_run", action="store_true", help=resume)
    parser.add_argument("--service", metavar="FILE", type=Path, help="service.json of the launch: report to it")
    trackers = "sets logging.trackers: tensorboard, wandb, mlflow, trackio, an installed logger or module:Class"
    parser.add_argument("--log", metavar="NAMES", type=names, help=trackers)
    parser.set_defaults(run=run_train, supervised=False)
    return parser


def run_train(args: argparse.Namespace) -> int:
    """Train; exit code 0 when a budget was reached or a pause or cancel request was fulfilled."""
    from gxpo_trainer.config.io import load_run, read_settings
    from gxpo_trainer.reporting.uploader import take_service
    from gxpo_trainer.training.launch import Launch
    from gxpo_trainer.training.run import describe_end, train_in_launch

    if args.service is not None and args.out is None:
        raise ConfigError("--service requires --out, the folder that the service created for the run")
    if args.supervised:
        learner = read_settings(args.config).get("learner")
        named = isinstance(learner, dict) and "rule" in learner
        args.set = ["rollout.source=dataset", *([] if named else ["learner.rule.name=grpo"]), *args.set]
    if args.log:
        args.set = [*args.set, f"logging.trackers={json.dumps(args.log)}"]
    service = take_service(args.service) if args.service else None
    # The service must be told about an invalid config; without a service nothing is created for one.
    config = load_run(args.config, args.set, runs_here=True) if service is None else None
    with Launch(args.out or Path("runs") / safe_name(config.name if config else ""), service) as launch:
        config = config or load_run(args.config, args.set, runs_here=True)
        ended = train_in_launch(config, launch, resume=args.resume, continue_run=args.continue_run)
    print(f"{config.name}: {describe_end(ended, launch)}; results in {launch.out_dir}", file=sys.stderr)
    return launch.exit_code


def safe_name(name: str) -> str:
    """A folder name from a run's name: letters, digits, dot, dash and underscore, without a leading dot."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name).lstrip(".") or "run"


def register_config(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("config", parents=[_SET], help="print a preset, check a run file, list all settings")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--preset", metavar="NAME", help="print this preset; --list-presets names them")
    what.add_argument("--file", metavar="FILE", type=Path, help="print this run file with all defaults filled in")
    checked = "check this run file; exit code 0 or 2; repeatable"
    what.add_argument("--check", metavar="FILE", type=Path, action="append", help=checked)
    shown = "print the first prompts of this run file as the policy sees them, and the first completion"
    what.add_argument("--show-prompt", metavar="FILE", type=Path, help=shown)
    what.add_argument("--schema", action="store_true", help="print the JSON schema of all settings")
    what.add_argument("--list-presets", action="store_true", help="print the names of the presets")
    parser.set_defaults(run=run_config)


def run_config(args: argparse.Namespace) -> int:
    from gxpo_trainer.config import io as config_io
    from gxpo_trainer.data.checks import check_files

    if args.list_presets:
        print("\n".join(config_io.preset_names()))
    elif args.schema:
        from gxpo_trainer.config import RunConfig

        print(json.dumps(RunConfig.model_json_schema(), indent=2, ensure_ascii=False))
    elif args.check is not None:
        for file in args.check:
            config = config_io.load_run(file, args.set, runs_here=True)
            found = check_files(config, gpus=_gpus_here(config))
            found.refuse()
            bounds = [f"{name} {value}" for name, value in config.budget.bounds.items()]
            print(f"{file}: valid, rule {config.learner.rule.name}, budget {', '.join(bounds)}")
            print("".join(f"  {note}\n" for note in found.notes), end="")
    elif args.show_prompt is not None:
        from gxpo_trainer.training.prepare import load_problems

        config = config_io.load_run(args.show_prompt, args.set, runs_here=True)
        print("\n\n".join(load_problems(config).shown()))
        if config.rollout.source != "dataset":
            counts = "only a box counts as answer" if config.trains_on_boxes else "any stated answer counts"
            print(f"\nreward: {counts}")
    else:
        load, what = (
            (config_io.load_preset, args.preset) if args.preset is not None else (config_io.load_run, args.file)
        )
        config = load(what, args.set)
        print(config_io.to_toml(config, _comments(config)), end="")
    return 0


def _gpus_here(config: RunConfig) -> int | None:
    """GPUs of this machine, where the run asks for some and joins no cluster."""
    if config.placement.device != "gpu":
        return None
    from gxpo_trainer.runtime.placement import ray_address, visible_gpus

    return visible_gpus() if ray_address(config) is None else None


def _comments(config: RunConfig) -> list[str]:
    """Backward passes per step, and the expected step at which noise alone fires the gate."""
    from gxpo_trainer.rules.gate import describe

    rule, gate = config.learner.rule, config.learner.rule.gate_config
    passes, closed = (rule.passes_per_step(gate_open=is_open) for is_open in (True, False))
    cost = f"{rule.label}: {passes} backward pass{'es' if passes > 1 else ''} per step"
    return [f"{cost} while the look-ahead is on, {closed} after it.", describe(gate)] if gate else [f"{cost}."]


def register_sandbox(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("sandbox", help="serve a reward that runs the policy's Python code against tests")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default 127.0.0.1")
    parser.add_argument("--port", metavar="N", type=int, default=8102, help="default 8102; 0: a free one")
    seconds = "for all tests of a response; default 10"
    parser.add_argument("--seconds", metavar="N", type=positive_seconds, default=10.0, help=seconds)
    parser.add_argument("--memory-mb", metavar="N", type=positive, default=512, help="of each process; default 512")
    parser.add_argument(
        "--processes", metavar="N", type=positive, default=16, help="and threads, of a test; default 16"
    )
    at_once = "responses tested at the same time; default: one for each CPU"
    parser.add_argument("--concurrency", metavar="N", type=positive, help=at_once)
    parser.add_argument("--python", metavar="FILE", help="interpreter of the code, which can read its whole folder")
    parser.set_defaults(run=run_sandbox)


def run_sandbox(args: argparse.Namespace) -> None:
    """Serve until interrupted; exit code 2 when this machine cannot isolate code."""
    from gxpo_trainer.grading.sandbox import Sandbox, serve
    from gxpo_trainer.planner.devices import usable_cores

    sandbox = Sandbox(args.seconds, args.memory_mb, args.processes, args.python)
    try:
        serve(sandbox, args.host, args.port, args.concurrency or usable_cores())
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {args.host} --port {args.port}: {error}; choose another address or port") from error


def register_plan(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("plan", parents=[_SET], help="memory, time and cost of a run before it starts")
    parser.add_argument("config", metavar="RUN.toml", type=Path, help="run file (.toml or .json)")
    parser.add_argument("--gpus", metavar="N", type=positive, help="GPUs that there are; default: as many as needed")
    parser.add_argument("--gpu", metavar="NAME", help="GPU, such as h100-80, or cpu; docs/planner.md lists them")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default text")
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan; exit code 0 when the run fits, else 1."""
    from gxpo_trainer.config.io import load_run
    from gxpo_trainer.data.checks import check_files
    from gxpo_trainer.planner import inputs_of, make_plan, report
    from gxpo_trainer.planner.devices import CPU, DEFAULT_GPU, device_named

    config = load_run(args.config, args.set)
    check_files(config).refuse()
    gpu = args.gpu or (DEFAULT_GPU if args.gpus is not None or config.placement.device == "gpu" else CPU)
    device = device_named(gpu)
    if device.kind == "cpu":
        device = dataclasses.replace(device, memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    teacher = None if config.teacher is None else _shape(config.of_reference, "teacher.path")
    plan = make_plan(inputs_of(config, _shape(config), device, args.gpus, teacher))
    if args.format == "json":
        print(report.view_of(plan).model_dump_json(indent=2))
    else:
        print(report.to_text(plan, config.name))
    return 0 if plan.fit.fits else 1


def _shape(config: RunConfig, setting: str = "model.path") -> ModelShape:
    """The model's shape; for a hub name that is not known only its config.json is downloaded."""
    from gxpo_trainer.learner.models import config_json
    from gxpo_trainer.planner.architectures import check_model
    from gxpo_trainer.planner.inputs import read_shape, shape_of

    where = f"{setting} = {config.model.path!r}"
    with contextlib.suppress(ConfigError):  # a hub name, or a folder that config_json refuses
        return read_shape(config.model.path, setting)
    try:
        body = config_json(config.model)
    except ImportError:
        fix = "install huggingface_hub, or use a local folder"
        raise ConfigError(f"{where}: its config is on the hub; {fix}") from None
    check_model(body, config)
    return shape_of(body, where)


def register_eval(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("eval", parents=[_SET], help="score a model on benchmarks")
    models = "model folder, hub name, `starter`, `starter-tools`, `starter-skill` or `starter-random`"
    parser.add_argument("--model", metavar="DIR", required=True, help=models)
    benchmarks = "comma-separated names, or .jsonl, .csv or .parquet files"
    parser.add_argument("--benchmark", metavar="NAMES", required=True, type=names, help=benchmarks)
    parser.add_argument("--samples", metavar="N", type=positive, default=16, help="responses per problem; default 16")
    parser.add_argument("--problems", metavar="N", type=positive, help="use the first N problems of each benchmark")
    limit = "longest response; default 3072 or what the model has room for, for an embedded policy 48 or 80"
    parser.add_argument("--max-new-tokens", metavar="N", type=positive, help=limit)
    parser.add_argument("--temperature", metavar="T", type=float, default=1.0, help="default 1")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="default 0")
    parser.add_argument("--data-root", metavar="DIR", type=Path, help="folder with local copies of the benchmarks")
    parser.add_argument("--template", metavar="T", default="auto", help="plain, boxed, or a text with {problem}")
    parser.add_argument("--out", metavar="FILE", type=Path, help="also write the scores to this file, as JSON lines")
    parser.set_defaults(run=run_eval)


def run_eval(args: argparse.Namespace) -> int:
    from gxpo_trainer.training.evaluation import evaluate_model

    return evaluate_model(args)


def register_grade(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("grade", help="verify answers in a file")
    parser.add_argument("file", metavar="FILE", type=Path, help="rows of gold and prediction: .jsonl, .csv or .parquet")
    parser.add_argument("--workers", metavar="N", type=positive, help="verifier processes; default: one per core")
    limit = "time limit per answer in seconds; default 5"
    parser.add_argument("--deadline", metavar="S", type=positive_seconds, default=5.0, help=limit)
    parser.set_defaults(run=run_grade)


def run_grade(args: argparse.Namespace) -> None:
    counts = grade_file(args.file, sys.stdout, workers=args.workers, deadline_s=args.deadline)
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()), file=sys.stderr)


GRADED_AT_ONCE = 4096
"""Answers that are graded before their verdicts are written."""
_PAIRS = "write rows with gold and prediction"


def grade_file(
    path_in: Path, out_stream: TextIO, workers: int | None = None, deadline_s: float = 5.0
) -> dict[str, int]:
    """Grade lines `{"gold": …, "prediction": …}`, perhaps with `"verify"` (VerifyOptions); count each verdict.

    `out_stream` gets one line `{"verdict", "extracted", "seconds", "detail"}` for each, in order. workers: processes;
    None: one per core. deadline_s: of one answer. Raises DataError, before grading, for an unusable file, and
    VerifierFailed when workers cannot be started.
    """
    from gxpo_trainer.data.prompts import field_text
    from gxpo_trainer.data.records import read_records
    from gxpo_trainer.grading.pool import VerifierPool
    from gxpo_trainer.planner.devices import usable_cores
    from gxpo_trainer.types import EXTRA_KEY, VERDICTS, VerifyOptions

    pairs = []
    for record in read_records([path_in]):
        prediction, given = record.fields.get("prediction"), record.fields.get(EXTRA_KEY)
        gold = field_text(record, "gold", _PAIRS)
        if not isinstance(prediction, str):  # text may be empty
            prediction = field_text(record, "prediction", _PAIRS)
        try:
            options = VerifyOptions.from_dict({} if given is None else given)
        except ValueError as error:
            raise DataError(f"{record.location}: {EXTRA_KEY!r}: {error}") from None
        pairs.append((gold, prediction, {"options": options.to_dict()}))
    if not pairs:
        raise DataError(f"{path_in}: is empty; {_PAIRS}")
    counts: Counter[str] = Counter()
    with VerifierPool(usable_cores() if workers is None else workers, deadline_s) as pool:
        for start in range(0, len(pairs), GRADED_AT_ONCE):
            for verdict in pool.submit(pairs[start : start + GRADED_AT_ONCE]).result():
                # UTF-8 cannot encode lone surrogates, which become escapes.
                extracted = verdict.extracted and verdict.extracted.encode("utf-8", "backslashreplace").decode("utf-8")
                result = {"verdict": verdict.status, "extracted": extracted, "seconds": round(verdict.seconds, 6)}
                if verdict.detail:
                    result["detail"] = verdict.detail
                out_stream.write(json.dumps(result, ensure_ascii=False) + "\n")
                counts[verdict.status] += 1
    return {status: counts[status] for status in VERDICTS}


def register_report(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("report", help="compare runs on disk: tables, curves and a page")
    parser.add_argument("runs", metavar="RUN_DIR", type=Path, nargs="+", help="output folders of runs")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("report"), help="default report")
    parser.add_argument("--baseline", metavar="NAME", help="what to compare with; default: the most accurate GRPO")
    parser.add_argument("--benchmark", metavar="NAME", help="default: the average of all")
    sampling = "share of a step that sampling takes, to say when a look-ahead pays; default: as measured"
    parser.add_argument("--sampling-share", metavar="S", type=share, help=sampling)
    parser.add_argument("--title", metavar="TEXT", default="Comparison of runs")
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Compare runs; those whose configs differ only in name and seed are seeds of one group."""
    from gxpo_trainer.compare.evidence import weigh
    from gxpo_trainer.compare.seeds import group_by_config
    from gxpo_trainer.compare.text_tables import all_tables
    from gxpo_trainer.jsonl import make_folder
    from gxpo_trainer.reporting.figures import PAGE_NAME, PNG_NAME, write_report
    from gxpo_trainer.reporting.reading import load_run, read_identity
    from gxpo_trainer.reporting.tables import show

    groups = group_by_config([(load_run(run, args.benchmark), read_identity(run)["config"]) for run in args.runs])
    names = [group.name for group in groups]
    if args.baseline is not None and args.baseline not in names:
        raise ConfigError(f"--baseline {args.baseline}: choose one of {', '.join(names)}")
    make_folder(args.out)
    shown = {"baseline": args.baseline, "sampling_share": args.sampling_share, "title": args.title}
    comparison = write_report(args.out, groups, **shown)
    for table in all_tables(groups, comparison, args.sampling_share):
        show(table)
    print(weigh(comparison).sentence)
    print(f"\nReport: {args.out / PAGE_NAME}\nCurves: {args.out / PNG_NAME}")
    return 0


def register_study(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("study", help="compare arms, each at its own best learning rate, on several seeds")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    execute = actions.add_parser("run", help="state the cost, then execute missing runs; may be interrupted")
    execute.add_argument("--jobs", metavar="N", type=positive, default=1, help="runs at a time; default 1")
    execute.set_defaults(run=run_study)
    status = actions.add_parser("status", help="runs done and missing, and the best learning rate of each arm")
    status.set_defaults(run=show_status)
    report = actions.add_parser("report", help="write the report, and the data that it is made from")
    page = "a .md file; default report.md in the folder of the data"
    report.add_argument("--page", metavar="FILE", type=Path, help=page)
    report.set_defaults(run=write_report)
    answer = actions.add_parser("answer", help="print what a study found, from its data")
    answer.set_defaults(run=print_answer)
    for action in (execute, status, report, answer):
        help_text = "data of its runs, which are not repeated; default: the folder next to the study file"
        action.add_argument("--data", metavar="DIR", type=Path, help=help_text)
        action.add_argument("study", metavar="STUDY.toml", type=Path, help="study file (.toml or .json)")
        if action is not answer:
            action.add_argument("--out", metavar="DIR", type=Path, help="folder of runs; default runs/studies/<name>")


def run_study(args: argparse.Namespace) -> int:
    from gxpo_trainer.jsonl import make_folder
    from gxpo_trainer.studies.data import known_results
    from gxpo_trainer.studies.definition import check_arms, pending
    from gxpo_trainer.studies.runner import StudyRunner, read_results

    study, root, data = _study(args)
    known = known_results(study, data)
    results = read_results(study, root, known)
    check_arms(study, run_here={key.arm for key in pending(study, results)}, begun=bool(results))
    _print_status(study, results)
    make_folder(root)
    # Python ends at SIGTERM without unwinding, which would leave the runs behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    StudyRunner(study, root, args.jobs, lambda line: print(line, file=sys.stderr, flush=True), known).run()
    print(f"{study.name} is complete; its runs are in {root}")
    return 0


def show_status(args: argparse.Namespace) -> int:
    from gxpo_trainer.studies.data import known_results
    from gxpo_trainer.studies.runner import read_results

    study, root, data = _study(args)
    _print_status(study, read_results(study, root, known_results(study, data)))
    return 0


def _print_status(study: Study, results: Results) -> None:
    from gxpo_client.formats import number_of
    from gxpo_trainer.studies.definition import best_point, largest_cost

    runs, passes = largest_cost(study)
    done_of = f"{number_of(len(results), 'run')} done of at most {runs}"
    print(f"{study.name}: {done_of}; at most {passes:,} backward passes in all")
    for name, arm in study.arms.items():
        point = best_point(study, name, results)
        done = sum(key.stage == "report" and key.arm == name for key in results)
        tuned = "not tuned yet" if point is None else f"best learning rate {point.text}"
        print(f"  {arm.label}: {tuned}, {done} of {len(study.seeds)} seeds done")


def write_report(args: argparse.Namespace) -> int:
    """Collect the runs where there are any, with those collected before; write the page and its pictures."""
    from gxpo_trainer.jsonl import check_output, make_folder
    from gxpo_trainer.studies import data as study_data, report

    study, root, earlier = _study(args)
    folder = _data_folder(args)
    if args.page:
        if args.page.suffix != ".md":
            raise ConfigError(f"--page {args.page}: the report is Markdown; name a .md file")
        check_output(args.page, "--page")
    if root.exists():
        make_folder(folder, "--data")
        study_data.write(study_data.collect(study, root, earlier), folder)
    page = args.page or folder / "report.md"
    report.write_report(study_data.read(folder), page)
    print(f"Data: {folder}\nReport: {page}")
    return 0


def print_answer(args: argparse.Namespace) -> int:
    """What the report of the collected data concludes, in plain text."""
    import textwrap

    from gxpo_trainer.studies import data as study_data
    from gxpo_trainer.studies.findings import find
    from gxpo_trainer.studies.report import conclusion, without_result

    data = study_data.read(_data_folder(args))
    findings = find(data)
    lines = [without_result(data)] if findings is None else conclusion(data, findings)
    for line in lines:
        print(textwrap.fill(line, 110, initial_indent="- ", subsequent_indent="  "))
    return 0


def _data_folder(args: argparse.Namespace) -> Path:
    folder: Path = args.data or args.study.with_suffix("")
    return folder


def _study(args: argparse.Namespace) -> tuple[Study, Path, StudyData | None]:
    """The study, the folder of its runs, and the data that was collected before."""
    from gxpo_trainer.studies import data as study_data
    from gxpo_trainer.studies.definition import load_study

    study, folder = load_study(args.study), _data_folder(args)
    earlier = study_data.read(folder) if (folder / study_data.STUDY).exists() else None
    return study, args.out or Path("runs") / "studies" / study.name, earlier


def register_track(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("track", help="send a run's trackers what they have missed")
    parser.add_argument("folder", metavar="RUN_DIR", type=Path, help="output folder of a run that has ended")
    parser.set_defaults(run=run_track)


def run_track(args: argparse.Namespace) -> int:
    """Exit code 1 when a tracker has not been sent everything."""
    from gxpo_trainer.config.run import LoggingConfig
    from gxpo_trainer.reporting.trackers import Trackers, current_config, ended_as
    from gxpo_trainer.runtime.locks import RunLock

    logging = LoggingConfig.model_validate(current_config(args.folder).get("logging", {}))
    if not logging.trackers:
        raise ConfigError(f"{args.folder}: the run has no trackers; logging.trackers names them")
    lock = RunLock(args.folder, 0)
    lock.acquire()
    try:
        with Trackers(args.folder, logging, print, finish_s=3600) as trackers:
            trackers.status = ended_as(args.folder)
    finally:
        lock.release()
    return 0 if trackers.complete else 1


def register_checkpoints(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("checkpoints", help="list a run's checkpoints, or export a policy from one")
    parser.add_argument("folder", metavar="RUN_DIR", type=Path, help="output folder of a run")
    parser.add_argument("--export", metavar="DIR", type=Path, help="copy the policy to this new folder")
    parser.add_argument("--step", metavar="N", type=positive, help="checkpoint to export; default the latest")
    parser.add_argument("--adapter", action="store_true", help="export the LoRA adapter alone, for PEFT")
    parser.set_defaults(run=run_checkpoints)


def run_checkpoints(args: argparse.Namespace) -> int:
    from gxpo_trainer.config import CheckpointConfig
    from gxpo_trainer.training.checkpoints import CHECKPOINTS, CheckpointStore, export_policy

    store = CheckpointStore(args.folder / CHECKPOINTS, CheckpointConfig())
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{args.folder} has no checkpoint; give the output folder of a run that has saved one")
    if args.export is None:
        if args.step or args.adapter:
            raise ConfigError("--step and --adapter need --export DIR, the new folder for the policy; add it")
        for step in steps:
            score = store.score(step)
            print(f"step {step}" + ("" if score is None else f"  pass@1 {score:.4f}"))
        return 0
    step = args.step or steps[-1]
    if step not in steps:
        raise CheckpointError(f"--step {step}: no such checkpoint; choose from {', '.join(map(str, steps))}")
    try:
        export_policy(store.load(step), args.export, adapter=args.adapter)
    except OSError as error:
        # copytree collects (source, target, reason) of all files.
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise CheckpointError(f"cannot write {args.export} ({reason}); free space or choose another folder") from error
    print(f"step {step} exported to {args.export}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
