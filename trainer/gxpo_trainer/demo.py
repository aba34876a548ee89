"""`gxpo demo`: GRPO, SFPO and GXPO on the embedded task, on equal batches, then what came out."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from gxpo_trainer.config_io import load_preset
from gxpo_trainer.figures import HTML_NAME, PNG_NAME, write_report
from gxpo_trainer.runs import group_runs
from gxpo_trainer.tables import print_tables
from gxpo_trainer.train import prepare, train_run

PRESETS = ("demo-grpo", "demo-sfpo", "demo")


def demo_command(args: argparse.Namespace) -> int:
    """Train the three rules one after the other; tables on stdout, figures and an HTML report in the folder."""
    from gxpo_trainer.engine.placement import start_ray

    out_dir = free_folder(args.out)
    configs = [load_preset(name, [f"budget.steps={args.steps}"]) for name in PRESETS]
    for config in configs:  # every check before the first engine starts
        prepare(config, out_dir / config.name, resume=False)
    say = f"three runs of {configs[0].budget.steps} steps on {configs[0].data.source}, results in {out_dir}"
    print(f"demo: {say}", file=sys.stderr)
    begun = time.monotonic()
    # One Ray for all three: each run starts its own actors on it and ends them.
    import ray

    start_ray(prepare(configs[0], out_dir / configs[0].name, resume=False).placement)
    try:
        for config in configs:
            train_run(config, out_dir / config.name)
    finally:
        ray.shutdown()
    print(f"demo: trained in {time.monotonic() - begun:.0f} s", file=sys.stderr)
    folders = [out_dir / config.name for config in configs]
    groups = group_runs(folders)
    comparison = write_report(out_dir, groups, title="gxpo demo: three update rules on the embedded task")
    # A pipe has no width of its own, and rich would fold the tables into 80 columns.
    print_tables(groups, comparison, Console(width=None if sys.stdout.isatty() else 120))
    print(f"\nReport: {out_dir / HTML_NAME}\nCurves: {out_dir / PNG_NAME}")
    return 0


def free_folder(wanted: Path) -> Path:
    """`wanted`, or the first of wanted-2, wanted-3, … that holds nothing: a demo never overwrites an earlier one."""
    candidate, number = wanted, 1
    while candidate.exists() and any(candidate.iterdir()):
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate
