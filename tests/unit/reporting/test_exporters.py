"""TensorBoard and W&B files, read back with their own formats."""

from __future__ import annotations

import importlib.util
import json
import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.reporting.exporters import make_exporters
from gxpo_trainer.reporting.identity import run_identity
from gxpo_trainer.reporting.reporter import RunReporter

BLOCK = 32768


def two_attempts(out_dir: Path, names: str) -> None:
    """Steps 1 to 4, a crash, and steps 3 to 5 again from the checkpoint at step 2."""
    with RunReporter(out_dir, exporters=make_exporters(names, out_dir), clock=lambda: 1000.0) as made:
        made.write_identity(run_identity(RunConfig(name="demo")))
        for step in (1, 2, 3, 4):
            made.log_metrics(step, {"reward/mean": step / 10})
        made.start_attempt(2, 2)
        for step in (3, 4, 5):
            made.log_metrics(step, {"reward/mean": step / 100, "gate/z": math.nan})


def tensorboard_scalars(log_dir: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(log_dir), purge_orphaned_data=True)
    events.Reload()
    return {
        tag: [(event.step, round(event.value, 6)) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_shows_the_merged_history(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    two_attempts(tmp_path, "tensorboard")
    scalars = tensorboard_scalars(tmp_path / "tensorboard")
    assert scalars["reward/mean"] == [(1, 0.1), (2, 0.2), (3, 0.03), (4, 0.04), (5, 0.05)]
    assert [step for step, _ in scalars["gate/z"]] == [3, 4, 5]
    assert all(math.isnan(value) for _, value in scalars["gate/z"])


def test_tensorboard_files_are_written_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    code = (
        "import sys; from pathlib import Path; from gxpo_trainer.reporting.exporters import make_exporters\n"
        "made, = make_exporters('tensorboard', Path(sys.argv[1]))\n"
        "made.write({'attempt': 1, 'step': 1, 'time': 1.0, 'metrics': {'a': 1.0}}); made.close()\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def wandb_records(path: Path) -> Iterator[bytes]:
    """Payloads of a .wandb file: a 7-byte head, then LevelDB's log of 32 KiB blocks (crc, length, type)."""
    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def test_wandb_writes_one_offline_run_per_attempt(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    # A process of its own: W&B keeps a service process and hooks until its parent ends.
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "import test_exporters; test_exporters.two_attempts(Path(sys.argv[2]), 'wandb')"
    )
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)], check=True, timeout=300)
    from wandb.proto import wandb_internal_pb2

    histories = []
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        rows = []
        for payload in wandb_records(file):
            record = wandb_internal_pb2.Record.FromString(payload)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                rows.append((int(items["_step"]), json.loads(items["reward/mean"])))
        histories.append(rows)
    assert histories == [[(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)], [(3, 0.03), (4, 0.04), (5, 0.05)]]


def test_an_unknown_exporter_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'--log mlflow: must be one of "tensorboard", "wandb", or a class as'):
        make_exporters("tensorboard,mlflow", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_reported_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--log wandb: the package 'wandb' is not installed; pip install wandb"):
        make_exporters(["wandb"], tmp_path)
