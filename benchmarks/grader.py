"""Verdicts per second of our grader against plain math-verify, on the same answers.

The mix: for every gold of the sets below, in that order, its equal forms and its wrong forms (`equal_forms.py`),
each as `The answer is $\\boxed{...}$.`; distinct (gold, response) pairs only, shuffled with a fixed seed, the first
20,000 taken. Peer: math-verify's `parse` of gold and response with its default settings and `verify`, in one
process, time-outs as shipped. Ours: a `VerifierPool` with as many workers as cores, started before the clock. The
two take turns on the same slices, so that both see the same machine; the ratio is the median over slices with a
bootstrap interval.

    python -m benchmarks.grader [--pairs 20000] [--peer-pairs 2000] [--workers 2] [--data ../shared/data]
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.equal_forms import equal_forms, wrong_forms
from benchmarks.measure import Figure, median, save, single
from gxpo_trainer.grading.pool import VerifierPool

SETS = ("math500", "amc23", "aime24", "minerva_math", "olympiadbench", "gsm8k_test", "math_train", "gsm8k_train")
SLICES = 10
DATA = Path(__file__).resolve().parents[1] / "../shared/data"

Pair = tuple[str, str]


REASONING = "Next, we use that $x^2 + 2x = {i}$, so the ratio is $\\frac{{{i}}}{{4}}$ and we get {i} again.\n"


def reasoning(chars: int) -> str:
    """About that many characters of worked steps, as a response has before its answer."""
    text = ""
    while len(text) < chars:
        text += REASONING.format(i=len(text) % 97 + 2)
    return text


def make_mix(data: Path, num_pairs: int, chars: int = 0, seed: int = 0) -> list[tuple[Pair, bool]]:
    """((gold, response), whether it is equal), distinct. chars: length of the reasoning before each answer."""
    before = reasoning(chars)
    mix: dict[Pair, bool] = {}
    for name in SETS:
        for line in (data / f"{name}.jsonl").read_bytes().splitlines():
            row = json.loads(line)
            gold = row.get("answer_latex") or row["answer"]
            for forms, equal in ((equal_forms(gold), True), (wrong_forms(gold), False)):
                for form in forms:
                    mix.setdefault((gold, f"{before}The answer is $\\boxed{{{form}}}$."), equal)
    items = list(mix.items())
    random.Random(seed).shuffle(items)
    return items[:num_pairs]


def peer_verdict(gold: str, response: str) -> bool:
    """Plain math-verify, as its documentation uses it."""
    from math_verify import parse, verify

    return bool(verify(parse(f"${gold}$"), parse(response)))


def measure(mix: list[tuple[Pair, bool]], num_peer: int, workers: int) -> list[Figure]:
    """Both graders on slices of the mix, in turn. The peer, being slow, sees the head of each slice."""
    peer_verdict("1", r"\boxed{1}")
    size, peer_size = len(mix) // SLICES, num_peer // SLICES
    ours_right = peer_right = 0
    ratios, ours_rates, peer_rates = [], [], []
    with VerifierPool(workers) as pool:
        pool.submit([(r"\frac{x}{2}", "x/2")] * 4 * workers).result()
        for i in range(SLICES):
            part = mix[i * size : (i + 1) * size]
            start = time.perf_counter()
            verdicts = pool.submit([pair for pair, _ in part]).result()
            ours_s = time.perf_counter() - start
            start = time.perf_counter()
            peer = [peer_verdict(*pair) for pair, _ in part[:peer_size]]
            peer_s = time.perf_counter() - start
            ours_right += sum((v.status == "correct") == e for v, (_, e) in zip(verdicts, part, strict=True))
            peer_right += sum(p == e for p, (_, e) in zip(peer, part, strict=False))
            ours_rates.append(size / ours_s)
            peer_rates.append(peer_size / peer_s)
            ratios.append(ours_rates[-1] / peer_rates[-1])
    return [
        median("gxpo", ours_rates, "verdicts/s", at_least=1000),
        median("math-verify", peer_rates, "verdicts/s"),
        median("gxpo / math-verify", ratios, "×", at_least=20),
        single("gxpo, agreement with the expected verdicts", ours_right / (size * SLICES)),
        single("math-verify, agreement with the expected verdicts", peer_right / (peer_size * SLICES)),
    ]


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--peer-pairs", type=int, default=2_000)
    parser.add_argument("--response-chars", type=int, default=0, help="characters of reasoning before each answer")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with a file SET.jsonl of each set")
    chosen = parser.parse_args(argv)
    if missing := [name for name in SETS if not (chosen.data / f"{name}.jsonl").is_file()]:
        raise SystemExit(f"nothing is measured: no data in {chosen.data} for {', '.join(missing)}; set --data")
    logging.disable(logging.WARNING)
    mix = make_mix(chosen.data, chosen.pairs, chosen.response_chars)
    settings = {name: value for name, value in vars(chosen).items() if name != "data"}
    save("grader", measure(mix, chosen.peer_pairs, chosen.workers), settings)


if __name__ == "__main__":
    main(sys.argv[1:])
