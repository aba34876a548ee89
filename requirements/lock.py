"""Write cpu.txt, dev.txt, service.txt and dashboard.txt from the environment that this script runs in.

Install the direct dependencies of the two .in files with pip's resolver into an empty environment, try the
product there, then run `make lock`. The script walks the installed metadata from the direct dependencies and
pins all that it reaches, so that `pip install --no-deps -r` needs no resolver. EXCLUDED is never pinned:

- torchvision, torchaudio, torchcodec: only CUDA builds exist for torch's CPU build, and with those
  `import vllm` and `import transformers` fail; nothing that the product uses needs them.
- triton: GPU kernels, 1 GB on disk; on a CPU nothing imports more than the question whether it is there.

service.txt and dashboard.txt are parts of cpu.txt, for images that need no torch. They are what others reach over the
network, so `uv pip compile` adds the hashes of their files on the index. The lists with torch have none:
the builds of torch and vllm for CPUs come from other places than the index, with other hashes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent
EXCLUDED = frozenset({"torchvision", "torchaudio", "torchcodec", "triton"})
HEADER = "# Written by requirements/lock.py; install with `pip install --no-deps -r`.\n"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_direct(path: Path) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def closure(roots: list[Requirement]) -> dict[str, str]:
    """Name → version of everything that `roots` need here; missing packages are an error."""
    pins: dict[str, str] = {}
    missing: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = list(roots)
    while todo:
        wanted = todo.pop()
        name, extras = canonical(wanted.name), frozenset(wanted.extras)
        if name in EXCLUDED or (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found = distribution(name)
        except PackageNotFoundError:
            missing.add(name)
            continue
        pins[name] = found.version
        for line in found.requires or []:
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                todo.append(needed)
    if missing:
        raise SystemExit(f"not installed: {', '.join(sorted(missing))}; install them, or add them to EXCLUDED")
    return pins


def write(path: Path, pins: dict[str, str]) -> None:
    path.write_text(HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items())))
    print(f"{path.name}: {len(pins)} packages")


def write_with_hashes(path: Path, pins: dict[str, str]) -> None:
    write(path, pins)
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "compile", str(path), "--no-deps", "--generate-hashes"]
    found = subprocess.run([*uv, "--no-header", "--no-annotate", "--quiet"], check=True, capture_output=True, text=True)
    path.write_text(HEADER + found.stdout)


def main() -> int:
    cpu = closure(read_direct(HERE / "cpu.in"))
    dev = closure(read_direct(HERE / "dev.in"))
    write(HERE / "cpu.txt", cpu)
    write(HERE / "dev.txt", {name: version for name, version in dev.items() if name not in cpu})
    for part in ("service", "dashboard"):
        pins = closure(read_direct(HERE / f"{part}.in"))
        if strange := pins.keys() - cpu.keys():
            raise SystemExit(f"{part}.in needs {', '.join(sorted(strange))}, which cpu.in does not reach; add it there")
        write_with_hashes(HERE / f"{part}.txt", pins)
    return 0


if __name__ == "__main__":
    sys.exit(main())
