"""`gxpo plan`: memory, time and cost of a run before it starts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gxpo_trainer.cli.arguments import Subparsers, add_set, positive

if TYPE_CHECKING:
    from gxpo_trainer.config import ModelConfig, RunConfig
    from gxpo_trainer.planner.calibration import Observation
    from gxpo_trainer.planner.devices import Device
    from gxpo_trainer.planner.shapes import ModelShape

RUN_CONFIG = "config.toml"


def register(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("plan", help="memory, time and cost of a run before it starts")
    parser.add_argument("config", metavar="RUN.toml", type=Path, help="run file (.toml or .json)")
    add_set(parser)
    parser.add_argument("--gpus", metavar="N", type=positive, help="GPUs that there are; default: as many as needed")
    parser.add_argument(
        "--gpu", metavar="NAME", help="kind of GPU, such as h100-80, or cpu; docs/planner.md lists them"
    )
    parser.add_argument(
        "--calibrate",
        metavar="RUN_DIR",
        type=Path,
        action="append",
        default=[],
        help="fit the assumptions to the metrics of this run, taken on the same kind of device; may be repeated",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan; exit code 0 when the run fits, else 1."""
    from gxpo_trainer.config.io import load_run
    from gxpo_trainer.planner import inputs_of, make_plan, report
    from gxpo_trainer.planner.calibration import calibrate
    from gxpo_trainer.planner.devices import assumptions_for

    config = load_run(args.config, args.set)
    device = _device(args.gpu, config, wants_gpus=args.gpus is not None)
    inputs = inputs_of(config, _shape(config.model), device, args.gpus)
    assumed = assumptions_for(device)
    if args.calibrate:
        assumed = calibrate(assumed, [_observed(folder, device) for folder in args.calibrate])
    plan = make_plan(inputs, assumed)
    if args.format == "json":
        print(report.view_of(plan).model_dump_json(indent=2))
    else:
        print(report.to_text(plan, config.name))
    return 0 if plan.fits else 1


def _device(name: str | None, config: RunConfig, *, wants_gpus: bool) -> Device:
    """The device asked for; without a name a default GPU for runs on GPUs, else this host."""
    import os

    from gxpo_trainer.planner.devices import CPU, DEFAULT_GPU, device_named, host

    if name is None:
        name = DEFAULT_GPU if wants_gpus or config.placement.device == "gpu" else CPU
    if name.lower() != CPU:
        return device_named(name)
    return host(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _shape(model: ModelConfig) -> ModelShape:
    """The model's shape; for a hub name that is not known only its config.json is downloaded."""
    from gxpo_trainer.errors import ConfigError
    from gxpo_trainer.models.load import HUB_NAME
    from gxpo_trainer.planner.shapes import read_folder, read_shape

    try:
        return read_shape(model.path)
    except ConfigError:
        if Path(model.path).expanduser().exists() or not HUB_NAME.fullmatch(model.path):
            raise
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(model.path, "config.json", revision=model.revision)
    except Exception as error:  # The hub client has no common base for offline, unknown name and no access.
        raise ConfigError(
            f"the config.json of model.path = {model.path!r} cannot be loaded from the hub ({type(error).__name__}); "
            "check the name and the connection, or use a local copy of the model"
        ) from error
    return read_folder(Path(file).parent, model.path)


def _observed(folder: Path, device: Device) -> Observation:
    """What a run on disk measured. Raises ConfigError for a folder that is no run."""
    from gxpo_trainer.config.io import load_run
    from gxpo_trainer.errors import ConfigError
    from gxpo_trainer.planner import inputs_of
    from gxpo_trainer.planner.calibration import observe
    from gxpo_trainer.records.reading import METRICS, read_metrics

    for name in (RUN_CONFIG, METRICS):
        if not (folder / name).is_file():
            raise ConfigError(f"--calibrate {folder} has no {name}; name the output folder of a run")
    config = load_run(folder / RUN_CONFIG, [])
    inputs = inputs_of(config, _shape(config.model), device)
    return observe(folder.name, inputs, [row["metrics"] for row in read_metrics(folder)])
