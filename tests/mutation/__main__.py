"""One mutation round over the pure modules: `make mutants`.

A mutant meets, in a copy of the tree, the unit tests of its package (see docs/mutants.md). Kills are kept in
build/mutants, because further tests kill no fewer.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path

from mutation.mutants import ROOT, Mutant, all_mutants, sample
from mutation.trees import WARM, Tree

RESULTS = ROOT / "build" / "mutants"
OUTCOMES = RESULTS / "outcomes.jsonl"
Sample = list[tuple[Mutant, str]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--sample", type=int, default=400)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="regular expression: the part of the sample to test")
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    mutants = all_mutants()
    chosen = sample(mutants, arguments.seed, arguments.sample)
    heading = f"{len(mutants)} mutants, a sample of {len(chosen)} at seed {arguments.seed}"
    chosen = [item for item in chosen if re.search(arguments.only, item[0].path)]
    print(heading, flush=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for name in WARM:
        importlib.import_module(name)
    jobs = arguments.jobs
    # In forks, which keep their imports out of the others.
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=judge, args=(RESULTS / f"tree{n}", chosen[n::jobs])) for n in range(jobs)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        return 1
    text = report(chosen, {key: outcome for key, _, outcome in recorded()}, heading)
    (RESULTS / "report.txt").write_text(text)
    print(text)
    return 0


def judge(folder: Path, share: Sample) -> None:
    """Test the mutants of one process and append the outcomes."""
    tree = Tree(folder)
    killed = {source: outcome for _, source, outcome in recorded() if outcome != "survived"}
    for mutant, source in share:
        start = time.monotonic()
        outcome = killed.get(digest(source)) or tree.outcome(mutant.path, source)
        seconds = time.monotonic() - start
        print(f"{outcome:9}{seconds:6.1f} s  {mutant.path}:{mutant.line} {mutant.operator}", flush=True)
        with OUTCOMES.open("a") as file:
            file.write(json.dumps([mutant.key, digest(source), outcome]) + "\n")


def report(chosen: Sample, outcomes: dict[str, str], heading: str) -> str:
    """Figures by package, and every survivor as the changed line."""
    packages: dict[str, Counter[str]] = {}
    survivors = []
    for mutant, source in chosen:
        outcome, parts = outcomes[mutant.key], Path(mutant.path).parts
        packages.setdefault("services" if parts[0] == "services" else parts[2], Counter())[outcome] += 1
        if outcome == "survived":
            original = (ROOT / mutant.path).read_text().splitlines()
            pairs = [(a, b) for a, b in zip(original, source.splitlines(), strict=False) if a != b]
            change = "\n".join(f"  - {a.strip()}\n  + {b.strip()}" for a, b in pairs[:2])
            survivors.append(f"{mutant.path}:{mutant.line}\n{change}")
    num = len(chosen) - len(survivors)
    lines = [heading, f"{num} of {len(chosen)} killed ({100 * num / len(chosen):.1f}%)"]
    lines += [f"  {name}: {dict(sorted(counts.items()))}" for name, counts in packages.items()]
    return "\n".join([*lines, "", "survivors:", *survivors]) + "\n"


def recorded() -> list[tuple[str, str, str]]:
    """(key, digest of the mutated file, outcome), oldest first."""
    return [tuple(json.loads(line)) for line in OUTCOMES.read_text().splitlines()] if OUTCOMES.exists() else []


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
