"""Identity of a run: everything that decides whether two runs are comparable. Free of torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gxpo_trainer
from gxpo_trainer.config import RunConfig
from gxpo_trainer.data.records import sha256_of_file
from gxpo_trainer.errors import DataError
from gxpo_trainer.planner.devices import usable_cores


def run_identity(
    config: RunConfig, *, data_sha256: Mapping[str, str] | None = None, policy_sha256: str | None = None
) -> dict[str, Any]:
    """The content of run.json. It names the hardware, but not the host.

    data_sha256: hash of each data file or generated set. policy_sha256: of the initial policy. Accelerators, which only
    torch knows, are not named.
    """
    packages = {name: dist.version for dist in importlib.metadata.distributions() if (name := dist.metadata["Name"])}
    return {
        "config": config.model_dump(mode="json"),
        "config_sha256": config.sha256(),
        "code": {
            "version": gxpo_trainer.__version__,
            "sha256": hash_path(Path(gxpo_trainer.__file__).parent, suffix=".py"),
        },
        "python": platform.python_version(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
        "hardware": {
            "cpu": _cpu_model(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "usable_cores": usable_cores(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "accelerators": [],
            "system": platform.system(),
        },
        "seeds": {"run": config.seed},
        "data_sha256": dict(sorted((data_sha256 or {}).items())),
        "policy_sha256": policy_sha256,
    }


def hash_path(path: Path, suffix: str = "") -> str:
    """SHA-256 of a file's bytes, or of a folder's relative file names and hashes, sorted by name.

    suffix: hash only those files of a folder. Raises DataError when the path cannot be read.
    """
    try:
        if not path.is_dir():
            return sha256_of_file(path)
        total = hashlib.sha256()
        for file in sorted(file for file in path.rglob(f"*{suffix}") if file.is_file()):
            total.update(f"{file.relative_to(path).as_posix()}\0{sha256_of_file(file)}\n".encode())
        return total.hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be hashed ({error.strerror}); check the path") from error


def _cpu_model() -> str:
    """CPU model from /proc/cpuinfo, else from `platform`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(named, platform.processor() or platform.machine())
