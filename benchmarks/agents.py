"""Agents that others wrote, and what they cost: `python -m benchmarks.agents PART [PYTHON]`.

overhead   sampling of 64 episodes by the gateway against the built-in calculator, with the same tokens, runs in turn.
           Of the agents, `bare` speaks HTTP by the standard library alone, `openai` by the client.
faults     1,000 episodes of which some hang, die, fork, flood, …, against the same episodes without faults: the policy
           does not change, so that an episode that is not disturbed has the same tokens.
libraries  held-out accuracy of starter-tools before and after GXPO steps on the calculator, when the agent is written
           with the openai client, openai-agents or pydantic-ai, unchanged; three seeds. PYTHON is that of an
           environment with these libraries (`pip install openai-agents "pydantic-ai-slim[openai]"`).
"""

from __future__ import annotations

import collections
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks import agent_programs
from benchmarks.learning import SEEDS, accuracies, scores
from benchmarks.measure import Figure, ratio, save, single
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import load_preset
from gxpo_trainer.reporting.reading import read_metrics, read_samples
from gxpo_trainer.training.run import train_run

STEPS = 8
FROZEN = "learner.optimizer.learning_rate=1e-30"
"""No weight of fp32 changes: every run samples the same tokens."""
LIBRARIES = ("openai_client", "openai_agents", "pydantic_ai")


def configured(environment: dict[str, Any], overrides: list[str]) -> RunConfig:
    settings = [f"environment.{name}={value!r}".replace("'", '"') for name, value in environment.items()]
    return load_preset("demo", ["model.path=starter-tools", "rollout.prompts_per_step=32", *settings, *overrides])


def overhead(folder: Path) -> None:
    environments = {
        "built-in": {"name": "calculator", "max_turns": 4, "max_observation_tokens": 12},
        **{
            name: {"name": "agent", "function": f"benchmarks.agent_programs:{name}", "max_turns": 4}
            for name in ("bare", "openai")
        },
    }
    fixed = ["rollout.prompts_per_step=8", "rollout.deterministic=true", "evaluation.benchmarks=[]", "budget.steps=13"]
    fixed.append(FROZEN)
    sampling: dict[str, list[float]] = collections.defaultdict(list)
    tokens: dict[str, list[float]] = collections.defaultdict(list)
    for turn in range(2):
        for name, environment in environments.items():
            out = folder / f"{name}-{turn}"
            os.environ.pop("GXPO_OPENAI", None)
            if name == "openai":
                os.environ["GXPO_OPENAI"] = "1"
            train_run(configured(environment, [f"seed={turn}", *fixed]), out)
            rows = [row["metrics"] for row in read_metrics(out) if row["step"] > 1]  # the first step compiles
            sampling[name] += [row["time/rollout_s"] for row in rows]
            tokens[name] += [row["rollout/tokens"] for row in rows]
    assert tokens["built-in"] == tokens["bare"] == tokens["openai"], "the same tokens are sampled"
    figures = [
        ratio(f"sampling of 64 episodes, {name} against built-in", sampling[name], sampling["built-in"], at_most=1.1)
        for name in ("bare", "openai")
    ]
    save("agents_overhead", figures, {"episodes": 64, "steps": len(sampling["bare"])})


def faults(folder: Path) -> None:
    kinds = folder / "kinds"
    kinds.touch()
    samples: dict[str, list[dict[str, Any]]] = {}
    for name in ("bare", "faulty"):
        environment = {
            "name": "agent",
            "function": f"benchmarks.agent_programs:{name}",
            "max_turns": 8,
            "memory_mb": 1024,
        }
        # 128 episodes in each of 8 steps, of which some are kept as samples.
        fixed = [
            "rollout.prompts_per_step=16",
            "budget.steps=8",
            "evaluation.benchmarks=[]",
            "environment.deadline_s=8",
        ]
        fixed += ["rollout.deterministic=true", "logging.samples_per_step=128", "verifier.max_failed_fraction=1.0"]
        os.environ["GXPO_KINDS"] = str(kinds)
        train_run(configured(environment, [*fixed, FROZEN]), folder / name)
        samples[name] = read_samples(folder / name)
    drawn = collections.Counter(kinds.read_text().splitlines()[1:])
    failing = sum(number for kind, number in drawn.items() if kind in agent_programs.FAILING)
    alone = {(row["step"], row["group"], row["sample"]): row for row in samples["bare"]}
    rows = [row["metrics"] for row in read_metrics(folder / "faulty") if row["step"] > 0]
    failed = sum(round(128 * (row["env/timeout_fraction"] + row["env/error_fraction"])) for row in rows)
    without = [row for row in samples["faulty"] if row["reward"] is None]
    calm = [row for row in samples["faulty"] if row["end"] == "done" and row["turns"]]
    same = [row["response"] == alone[row["step"], row["group"], row["sample"]]["response"] for row in calm]
    strays = subprocess.run(["pgrep", "-fc", agent_programs.STRAY], capture_output=True, text=True, check=False)
    figures = [
        single("episodes", drawn.total()),
        *(single(f"episodes that {kind}", number) for kind, number in sorted(drawn.items())),
        single("episodes that should fail", failing),
        single("episodes with verdict timeout or error", failed),
        single("of these, more or fewer than should fail", abs(failed - failing), at_most=0),
        single("recorded episodes", len(samples["faulty"])),
        single(
            "of those without a reward, ends other than error and timeout",
            sum(row["end"] not in ("error", "timeout") for row in without),
            at_most=0,
        ),
        single("undisturbed episodes", len(calm)),
        single("of these, other tokens than without faults", len(same) - sum(same), at_most=0),
        single("processes left", int(strays.stdout or 0), at_most=0),
    ]
    save("agents_faults", figures, {"failing": sorted(agent_programs.FAILING)})


@contextmanager
def served(python: str) -> Iterator[str]:
    """The agents of the libraries, at an address of loopback."""
    port = random.randrange(20000, 30000)
    path = os.pathsep.join(str(Path(__file__).parents[1] / part) for part in ("", "trainer"))
    command = [python, "-m", "benchmarks.agent_programs", str(port)]
    server = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    try:
        for _ in range(600):
            try:
                httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        address = f"http://127.0.0.1:{port}"
        os.environ["GXPO_ENVIRONMENT_URLS"] = ",".join(f"{address}/{name}" for name in LIBRARIES)
        yield address
    finally:
        server.terminate()
        server.wait()


def libraries(folder: Path, python: str) -> None:
    figures: list[Figure] = []
    with served(python) as address:
        for name in LIBRARIES:
            for seed in SEEDS:
                out = folder / f"{name}-{seed}"
                if not (out / "outcome.json").exists():
                    evaluation = [
                        "evaluation.every_steps=0",
                        "evaluation.num_problems=256",
                        "evaluation.samples_per_prompt=2",
                    ]
                    budget = [f"seed={seed}", f"budget.steps={STEPS}"]
                    environment = {"name": "agent", "url": f"{address}/{name}", "max_turns": 4}
                    train_run(configured(environment, [*evaluation, *budget]), out)
                before, after = scores(out)
                figures += accuracies(f"{name}, seed {seed}", before, after, least=0.2)
    save("agents_libraries", figures, {"steps": STEPS, "problems": 256, "samples": 2})


def main(part: str, python: str = sys.executable, kept: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(kept or temporary)
        if part == "libraries":
            libraries(folder, python)
        else:
            {"overhead": overhead, "faults": faults}[part](folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
