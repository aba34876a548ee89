"""The process that verifies answers: `python -m gxpo_trainer.grading.worker MEMORY_MB PARENT`.

Messages are lines of JSON on a socket, which is its standard input. In: `[gold, response]`, with a third entry
`{"options": …, "context": …}` for an answer with options, or one to be scored; with `{"status": …, "context": …}` it is
only scored, because its environment gave the verdict. Out: `{"cpu": …}` once it is ready; then for each answer the
fields of its Verdict and `cpu`, the CPU time of the process so far, seconds. Before reward components of an answer are
computed, `{"scoring": true}`; they add `components` and `score`. The worker imports neither torch nor Ray, ends when
its input ends, and dies with its parent. With reward components it is `gxpo_trainer.grading.reward_worker`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from gxpo_trainer.grading.pool import die_with_parent, limit_process
from gxpo_trainer.types import Verdict

OUT_OF_MEMORY_EXIT = 3
_LONGEST_DETAIL = 1000
OUT_OF_MEMORY = "out of memory (verifier.memory_mb)"

Score = Callable[[str, str, Verdict, dict[str, Any]], dict[str, Any]]
"""(gold, response, verdict, context) -> further fields of the answer's message."""


def serve(memory_mb: int, parent: int, score: Score | None = None) -> int:
    """Serve answers until the input ends. Exit code 3: out of memory was reported and the process must be replaced."""
    die_with_parent(parent)
    limit_process(memory_mb)
    channel = socket.socket(fileno=os.dup(0))

    def send(**message: Any) -> None:
        channel.sendall(json.dumps(message).encode() + b"\n")

    from gxpo_trainer.grading.engine import warm_up

    warm_up()
    send(cpu=time.process_time())
    for line in channel.makefile("rb"):
        gold, response, *extras = json.loads(line)
        fields = _verify_one(gold, response, extras[0] if extras else {}, score, lambda: send(scoring=True))
        send(**fields, cpu=time.process_time())
        if fields["detail"] == OUT_OF_MEMORY:
            return OUT_OF_MEMORY_EXIT
    return 0


def _verify_one(
    gold: str, response: str, extras: dict[str, Any], score: Score | None, announce: Callable[[], None]
) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        verdict = _verdict(gold, response, extras)
        fields = {"status": verdict.status, "extracted": verdict.extracted, "detail": verdict.detail}
        if score is not None and "context" in extras:
            announce()
            fields |= score(gold, response, verdict, extras["context"])
    except MemoryError:
        fields = {"status": "error", "extracted": None, "detail": OUT_OF_MEMORY}
    except Exception as error:
        # The grader's own failure says nothing about the answer: it is reported, never scored.
        fields = {
            "status": "error",
            "extracted": None,
            "detail": f"{type(error).__name__}: {str(error)[:_LONGEST_DETAIL]}",
        }
    return {**fields, "seconds": time.perf_counter() - start}


def _verdict(gold: str, response: str, extras: dict[str, Any]) -> Verdict:
    from gxpo_trainer.grading.options import VerifyOptions
    from gxpo_trainer.grading.verify import verify

    if "status" in extras:
        return Verdict(extras["status"], None, 0.0)
    rules = extras.get("options")
    return verify(gold, response) if rules is None else verify(gold, response, VerifyOptions.from_dict(rules))


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), int(sys.argv[2])))
