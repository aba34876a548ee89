"""The process that verifies answers: `python -m gxpo_trainer.verify.worker MEMORY_MB PARENT`.

Frames on standard input and output are a 4-byte big-endian length and UTF-8 JSON. In: `[[gold, response], ...]`, with
a third entry `{"options": …, "context": …}` for an answer with rules of its own, or one to be scored.
Out: `{"ready": true}` once, then one `{"i", "status", "extracted", "seconds", "cpu", "detail"}` per answer, in order,
as each is done, where `cpu` is the CPU time of the process so far, seconds. Before reward components of an answer are
computed, `{"scoring": true}`; they add `components` and `score`. The worker imports neither torch nor Ray, ends when
its input ends, and dies with its parent. With reward components it is `gxpo_trainer.rewards.worker`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from gxpo_trainer.types import Verdict

PR_SET_PDEATHSIG = 1
OUT_OF_MEMORY_EXIT = 3

Score = Callable[[str, str, Verdict, dict[str, Any]], dict[str, Any]]
"""(gold, response, verdict, context) -> further fields of the answer's message."""


def serve(memory_mb: int, parent: int, score: Score | None = None) -> int:
    """Serve answers until the input ends. Exit code 3: out of memory was reported and the process must be replaced."""
    _die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Library output must not end up between two frames.
    os.dup2(2, 1)
    limit = memory_mb * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    from gxpo_trainer.verify.engine import warm_up

    warm_up()
    _send(sink, {"ready": True})
    while (batch := _receive(source)) is not None:
        for i, entry in enumerate(batch):
            extras = entry[2] if len(entry) > 2 else {}
            scored = score if "context" in extras else None
            answer = _verify_one(entry[0], entry[1], extras, scored, lambda: _send(sink, {"scoring": True}))
            _send(sink, {"i": i, **answer, "cpu": time.process_time()})
            if answer.get("detail", "").startswith("out of memory"):
                return OUT_OF_MEMORY_EXIT
    return 0


def _verify_one(
    gold: str, response: str, extras: dict[str, Any], score: Score | None, announce: Callable[[], None]
) -> dict[str, Any]:
    from gxpo_trainer.verify.math import verify
    from gxpo_trainer.verify.options import VerifyOptions

    start = time.perf_counter()
    try:
        rules = extras.get("options")
        verdict = verify(gold, response) if rules is None else verify(gold, response, VerifyOptions.from_dict(rules))
        fields = {"status": verdict.status, "extracted": verdict.extracted, "detail": verdict.detail}
        if score is not None:
            announce()
            fields |= score(gold, response, verdict, extras["context"])
    except MemoryError:
        fields = {"status": "error", "extracted": None, "detail": "out of memory (verifier.memory_mb)"}
    except Exception as error:
        # The grader's own failure says nothing about the answer: it is reported, never scored.
        fields = {"status": "error", "extracted": None, "detail": f"{type(error).__name__}: {str(error)[:200]}"}
    return {**fields, "seconds": time.perf_counter() - start}


def _die_with_parent(parent: int) -> None:
    """SIGKILL to ourselves when the parent thread ends, also in the middle of an answer (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the parent of this verifier worker has ended")


def _send(sink: BinaryIO, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    sink.write(struct.pack(">I", len(body)) + body)
    sink.flush()


def _receive(source: BinaryIO) -> list[list[Any]] | None:
    header = source.read(4)
    if len(header) < 4:
        return None
    body = source.read(struct.unpack(">I", header)[0])
    batch: list[list[Any]] = json.loads(body)
    return batch


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), int(sys.argv[2])))
