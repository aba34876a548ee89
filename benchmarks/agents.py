"""Agents that others wrote, and what they cost: `python -m benchmarks.agents PART [PYTHON]`.

overhead   sampling of 64 episodes by the gateway against the built-in calculator, with the same tokens, in turn in one
           engine, by two policies: starter-tools, and the same with further weights of 0, which takes longer. Agents:
           one of the standard library and one with OpenAI's client, in a new process for each episode; and one with
           OpenAI's client that already runs, which shows what the gateway itself takes. Under 6 minutes.
faults     1,000 episodes of which some hang, die, fork, flood, …, against the same episodes without faults: the policy
           does not change, so that an episode that is not disturbed has the same tokens.
libraries  held-out accuracy of starter-tools before and after GXPO steps on the calculator, when the agent is written
           with the openai client, openai-agents or pydantic-ai, unchanged; three seeds. PYTHON is that of an
           environment with these libraries (`pip install openai-agents "pydantic-ai-slim[openai]"`).
"""

from __future__ import annotations

import collections
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import ray
from transformers import AutoTokenizer

from benchmarks import agent_programs
from benchmarks.measure import Figure, median, ratio, save, single
from benchmarks.policies import grown
from benchmarks.tools_demo import SEEDS, accuracies, scores
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import load_preset
from gxpo_trainer.config.tasks import EnvironmentConfig
from gxpo_trainer.data.chat import render_messages
from gxpo_trainer.data.word_problems import generate
from gxpo_trainer.environments.host import EnvironmentHost
from gxpo_trainer.environments.loading import URLS
from gxpo_trainer.learner.models import STARTER_TOOLS_FOLDER
from gxpo_trainer.reporting.reading import read_metrics, read_samples
from gxpo_trainer.rollout.environments import EnvironmentHandle
from gxpo_trainer.rollout.sampler import SamplerActor, SamplerSettings, remote_sampler
from gxpo_trainer.rollout.vllm_driver import EpisodeStart, Intake, SampleRequest, SamplingSettings
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.ray_session import ray_session
from gxpo_trainer.training.run import train_run

STEPS = 8
FROZEN = "learner.optimizer.learning_rate=1e-30"
"""No weight of fp32 changes: every run samples the same tokens."""
SECONDS_A_POLICY = 75.0
LIBRARIES = ("openai_client", "openai_agents", "pydantic_ai")


def configured(environment: dict[str, Any], overrides: list[str]) -> RunConfig:
    settings = [f"environment.{name}={value!r}".replace("'", '"') for name, value in environment.items()]
    return load_preset("demo", ["model.path=starter-tools", "rollout.prompts_per_step=32", *settings, *overrides])


class Engine(SamplerActor):
    def episodes(
        self, requests: list[SampleRequest], config: EnvironmentConfig, environments: EnvironmentHandle
    ) -> tuple[float, list[list[int]]]:
        """Seconds that the requests take in this environment, and the tokens of all samples."""
        chosen = self._settings.config.model_copy(update={"environment": config})
        self._settings, self.environments = replace(self._settings, config=chosen), environments
        groups: dict[int, Any] = {}
        begin = time.perf_counter()
        intake = Intake(list(enumerate(requests)), closed=True)
        for item in self.sample(intake, SamplingSettings(max_new_tokens=96), 0):
            groups |= item.groups
        seconds = time.perf_counter() - begin
        order = sorted(groups)
        return seconds, [row.token_ids.tolist() for i in order for s in groups[i].samples for row in s.rows]


def requests_of(round_: int, tokenizer: Any) -> list[SampleRequest]:
    """8 problems of the word problems with 8 samples each."""
    drawn = []
    for number, prompt in enumerate(generate("train", 8, seed=round_)):
        ids = render_messages([{"role": "user", "content": prompt.text}], tokenizer)
        drawn.append(SampleRequest(prompt, ids, 8, number, None, EpisodeStart.of(prompt, "{problem}", number)))
    return drawn


@contextmanager
def started(environment: dict[str, Any]) -> Iterator[tuple[EnvironmentConfig, EnvironmentHandle]]:
    config = RunConfig.model_validate({"environment": environment}).environment
    variables = {name: os.environ.get(name, "") for name in ("PYTHONPATH", URLS)}
    options = {"num_cpus": 0, "max_concurrency": 10_000, "runtime_env": {"env_vars": variables}}
    actor: Any = ray.remote(EnvironmentHost).options(**options).remote(config)
    try:
        yield config, EnvironmentHandle(actor)
    finally:
        ray.get(actor.aclose.remote())
        ray.kill(actor)


def overhead(folder: Path) -> None:
    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    policies = {"1 M": STARTER_TOOLS_FOLDER, "39 M": folder / "grown"}
    grown(policies["39 M"], STARTER_TOOLS_FOLDER, layers=24, intermediate=4096)
    figures: list[Figure] = []
    rounds: dict[str, int] = {}
    with served(sys.executable) as address, ray_session(Placement.decide(RunConfig())), ExitStack() as stack:
        agent = {"name": "agent", "max_turns": 4}
        arms = {
            "built-in": {"name": "calculator", "max_turns": 4, "max_observation_tokens": 12},
            "standard library": {**agent, "function": "benchmarks.agent_programs:bare"},
            "OpenAI's client": {**agent, "function": "benchmarks.agent_openai:play"},
            "OpenAI's client, already running": {**agent, "url": f"{address}/openai_client"},
        }
        environments = {name: stack.enter_context(started(arm)) for name, arm in arms.items()}
        for size, path in policies.items():
            seconds = _seconds(path, environments, budget_s=SECONDS_A_POLICY)
            rounds[size] = len(seconds["built-in"])
            for name in arms:
                figures.append(median(f"{size}, {name}", seconds[name], "s for 64 episodes"))
            for name in [*arms][1:]:
                figures.append(
                    ratio(f"{size}, {name} against built-in", seconds[name], seconds["built-in"], at_most=1.1)
                )
                more = [1000 / 64 * (own - base) for own, base in zip(seconds[name], seconds["built-in"], strict=True)]
                figures.append(median(f"{size}, {name}, more than built-in", more, "ms an episode"))
    save("agents_overhead", figures, {"episodes": 64, "rounds": rounds})


def _seconds(policy: Path, environments: dict[str, Any], budget_s: float) -> dict[str, list[float]]:
    """By environment, the seconds of each round; a round has all environments, in an order that changes."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    rollout = {"dtype": "float32", "deterministic": True}
    config = RunConfig.model_validate({"model": {"max_length": 256}, "rollout": rollout})
    settings = SamplerSettings(config, str(policy), threads=2, initial_version=0)
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "2"}}}
    engine = remote_sampler(Engine).options(**options).remote(settings)
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    names = [*environments]
    end, round_ = math.inf, 0
    while time.perf_counter() < end or round_ < 5:
        tokens = {}
        for name in [*names[round_ % len(names) :], *names[: round_ % len(names)]]:
            environment, handle = environments[name]
            taken, tokens[name] = ray.get(engine.episodes.remote(requests_of(round_, tokenizer), environment, handle))
            seconds[name].append(taken)
        assert all(own == tokens["built-in"] for own in tokens.values()), "the same tokens are sampled"
        if round_ == 0:  # what is loaded and compiled at the first use
            seconds.clear()
            end = time.perf_counter() + budget_s
        round_ += 1
    ray.kill(engine)
    return seconds


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
        single("processes left", agent_programs.strays(), at_most=0),
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
