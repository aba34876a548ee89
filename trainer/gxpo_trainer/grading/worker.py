"""The process that verifies answers: `python -m gxpo_trainer.grading.worker MEMORY_MB PARENT REWARDS`.

REWARDS is the JSON of a list of RewardConfig: the reward components that it can score; `[]` for none.

Messages are lines of JSON on a socket, which is its standard input. In: `[gold, response]`, with a third entry
`{"options": …, "context": …}` for an answer with options, or one to be scored; with `{"status": …, "context": …}` it is
only scored, because its environment gave the verdict. Out: `{"cpu": …}` once it is ready; then for each answer the
fields of its Verdict and `cpu`, the CPU time of the process so far, seconds. Before reward components of an answer are
computed, `{"scoring": true}`; they add `components` and `score`. The worker imports neither torch nor Ray, ends when
its input ends, and dies with its parent.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

from gxpo_trainer.errors import ConfigError
from gxpo_trainer.grading.engine import engine_equal
from gxpo_trainer.grading.options import VerifyOptions
from gxpo_trainer.grading.pool import die_with_parent, limit_process
from gxpo_trainer.grading.rewards import Scorer
from gxpo_trainer.grading.verify import verify
from gxpo_trainer.types import Verdict

UNUSABLE_REWARDS_EXIT, OUT_OF_MEMORY_EXIT = 2, 3
_LONGEST_DETAIL = 1000
OUT_OF_MEMORY = "out of memory (verifier.memory_mb)"


def serve(memory_mb: int, parent: int, scorer: Scorer | None = None) -> int:
    """Serve answers until the input ends. Exit code 3: out of memory was reported and the process must be replaced."""
    die_with_parent(parent)
    limit_process(memory_mb)
    channel = socket.socket(fileno=os.dup(0))
    replies = channel.makefile("w")
    # Imports math-verify and builds its parser's tables (about 1.5 s), which no answer should be charged for.
    engine_equal("x+1", "1+x")
    print(json.dumps({"cpu": time.process_time()}), file=replies, flush=True)
    for line in channel.makefile("rb"):
        gold, response, *rest = json.loads(line)
        extras = rest[0] if rest else {}
        start = time.perf_counter()
        try:
            if "status" in extras:
                verdict = Verdict(extras["status"], None, 0.0)
            else:
                verdict = verify(gold, response, VerifyOptions.from_dict(extras.get("options", {})))
            fields = {"status": verdict.status, "extracted": verdict.extracted, "detail": verdict.detail}
            if scorer is not None and "context" in extras:
                print(json.dumps({"scoring": True}), file=replies, flush=True)
                fields |= scorer.score(gold, response, verdict, extras["context"])
        except Exception as error:
            # The grader's own failure says nothing about the answer: it is reported, never scored.
            memory = isinstance(error, MemoryError)
            detail = OUT_OF_MEMORY if memory else f"{type(error).__name__}: {str(error)[:_LONGEST_DETAIL]}"
            fields = {"status": "error", "extracted": None, "detail": detail}
        times = {"seconds": time.perf_counter() - start, "cpu": time.process_time()}
        print(json.dumps(fields | times), file=replies, flush=True)
        if fields["detail"] == OUT_OF_MEMORY:
            return OUT_OF_MEMORY_EXIT
    return 0


def main(memory_mb: str, parent: str, rewards: str) -> int:
    """Serve answers until the input ends. Exit code 2: the rewards cannot be used; else as `serve`."""
    components = json.loads(rewards)
    try:
        scorer = Scorer.load(components, os.environ) if components else None
    except ConfigError as error:
        print(error, file=sys.stderr)
        return UNUSABLE_REWARDS_EXIT
    return serve(int(memory_mb), int(parent), scorer)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
