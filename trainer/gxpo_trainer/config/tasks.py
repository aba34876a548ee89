"""Settings of what is learned: training problems, the environment between the policy's turns, the verifier and the
components of the reward, and the benchmarks."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, FiniteFloat, field_validator, model_validator

from gxpo_trainer.config.base import (
    MOST_MEMORY_MB,
    MOST_STEPS,
    MOST_TOKENS,
    Deadline,
    Fraction,
    Processes,
    Settings,
    Steps,
    Temperature,
    Tokens,
)
from gxpo_trainer.config.components import Choice, union_by_name
from gxpo_trainer.types import Prompt

EMBEDDED_TASKS = ("word_problems", "arithmetic_skill")
"""Generated problems, as `data.source` and as a benchmark: short ones for a policy that either works an answer out or
guesses it, and long ones for a policy that works every answer out and miscalculates."""


TEMPLATES = {
    "plain": "{problem}",
    "boxed": "{problem}\n\nReason step by step and put the final answer in \\boxed{}.",
}


def _with_problem(value: str) -> str:
    if "{problem}" not in TEMPLATES.get(value, value) and value != "auto":
        raise ValueError(f"must be one of {', '.join(('auto', *TEMPLATES))}, or a text that contains {{problem}}")
    return value


Template = Annotated[str, Field(max_length=100_000), AfterValidator(_with_problem)]


class DataSourceConfig(Settings):
    """A list: one `[[data.sources]]`, or `[[warm_start.data.sources]]`, a data set, in place of `source`
    (docs/models.md)."""

    path: str = Field(description="As data.source.")
    weight: FiniteFloat = Field(1.0, gt=0, description="Share of the prompts of every step, relative to the others'.")
    name: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]*)?$",
        max_length=64,
        description="Name in metrics, `reward/source/<name>`, and in samples; empty: the file's or folder's.",
    )
    split: str = Field("", description="Empty: data.split.")
    subset: str | None = Field("", description="Empty: data.subset.")
    prompt_field: str = Field("", description="Empty: data.prompt_field.")
    answer_field: str | None = Field("", description="Empty: data.answer_field; none: its rows have no answer.")
    rewards: tuple[str, ...] = Field(
        (), max_length=100, description="Components of verifier.rewards that judge it, by name or label; none: all."
    )

    @property
    def label(self) -> str:
        """Name of its metrics and in samples.jsonl."""
        return self.name or re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(self.path).stem)[:64] or "source"


class DataConfig(Settings):
    """Training problems."""

    source: str = Field(
        "word_problems",
        description="`word_problems` or `arithmetic_skill` (embedded tasks), a .jsonl, .csv or .parquet file, a local "
        "folder in hub layout, or a hub name.",
    )
    sources: tuple[DataSourceConfig, ...] = Field(
        (), max_length=100, description="Several data sets, each with its share of every step's prompts."
    )
    split: str = Field("train", description="Split of a hub data set.")
    subset: str | None = Field(None, description="Configuration name of a hub data set.")
    prompt_field: str = Field("problem", description="The problem: a text, or messages with `role` and `content`.")
    answer_field: str | None = Field(
        "answer", description="Field that holds the final answer; none: rows have none, for rewards that need none."
    )
    completion_field: str = Field(
        "completion",
        description="Field that holds the response to learn, for rollout.source = dataset and for warm_start; embedded "
        "tasks have their worked answers. Rows need no answer then.",
    )
    template: Template = Field(
        "auto",
        description="`plain`, `boxed`, a text with {problem}, or `auto`: plain for embedded tasks, else boxed. Of "
        "messages it applies to the last one.",
    )
    system_prompt: str | None = Field(
        None,
        min_length=1,
        max_length=100_000,
        description="System message before each problem, in training and evaluation; a row's own replaces it.",
    )
    levels: tuple[Annotated[int, Field(ge=-MOST_STEPS, le=MOST_STEPS)], ...] | None = Field(
        None, max_length=100, description="Keep only these MATH levels, e.g. [3, 4, 5]."
    )
    num_problems: int = Field(4096, ge=1, le=10_000_000, description="Embedded tasks only: generated problems.")
    difficulty: tuple[Literal["easy", "medium", "hard"], ...] = Field(
        ("easy", "medium", "hard"),
        min_length=1,
        max_length=100,
        description="`word_problems` only: levels to draw from; those of `data` select the benchmark's problems too.",
    )
    guess_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="`word_problems` only: share of the completions to learn that guess instead of working the answer "
        "out, as data of mixed quality do.",
    )
    contamination: Literal["drop", "refuse", "ignore"] = Field(
        "drop",
        description="Training problems that occur in a benchmark of this run: excluded and counted, an error, or kept.",
    )
    max_prompt_tokens: Tokens = Field(1024, description="Longer prompts are excluded and counted.")
    shuffle: bool = Field(True, description="A new order each epoch, from the seed.")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.sources and self.source != type(self).model_fields["source"].default:
            raise ValueError(f"source = {self.source!r} and sources are both set; remove one of them")
        labels = [source.label for source in self.sources]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"two sources are called {twice[0]}, so their metrics would be one; set the name of one")
        return self

    @property
    def parts(self) -> tuple[DataConfig, ...]:
        """The settings of each of `sources` as those of a single one; the settings themselves without any."""
        inherited = ("split", "subset", "prompt_field", "answer_field")
        own = [{name: getattr(s, name) for name in inherited if getattr(s, name) != ""} for s in self.sources]
        paths = [{"source": source.path, "sources": ()} for source in self.sources]
        return tuple(self.model_copy(update=a | b) for a, b in zip(own, paths, strict=True)) or (self,)

    @property
    def embedded(self) -> bool:
        """Whether all problems are generated."""
        return all(part.source in EMBEDDED_TASKS for part in self.parts)

    @property
    def shares(self) -> tuple[float, ...]:
        """Part of the prompts that each of `sources` gives."""
        total = sum(source.weight for source in self.sources)
        return tuple(source.weight / total for source in self.sources)

    @property
    def template_text(self) -> str:
        """The template, with {problem}."""
        template = "plain" if self.template == "auto" and self.embedded else self.template
        return TEMPLATES.get("boxed" if template == "auto" else template, template)


SINGLE_TURN = "single_turn"
OPENENV = "openenv"
AGENT: Final = "agent"
OWN_ENVIRONMENTS = (SINGLE_TURN, "calculator", OPENENV, AGENT)


class EnvironmentConfig(Settings):
    """What answers the policy between its turns, in killable processes (docs/environments.md)."""

    implementation: ClassVar[str]
    """Of a subclass: `module:Class` of the environment; the class takes these settings."""

    name: str = Field(
        SINGLE_TURN,
        description="`single_turn`, `calculator`, `openenv`, `agent`, the name of an installed one, or a class as "
        "`package.module:Class`.",
    )
    url: str | None = Field(None, description="Address of an OpenEnv server, as http://host:port.")
    action_field: str = Field("message", description="Field of an OpenEnv action that gets the policy's text.")
    observation_field: str | None = Field(
        None, description="Field of an OpenEnv observation that the policy reads; default: all of it, as JSON."
    )
    max_turns: int = Field(4, ge=1, le=10_000, description="Turns of the policy in an episode.")
    max_observation_tokens: Tokens = Field(
        64, description="Longest answer of the environment, with its role tokens; what is longer is cut."
    )
    deadline_s: Deadline = Field(5.0, description="Time limit of one call, after which its process is killed.")
    workers: Processes = Field(4, description="Calls that run at the same time.")
    memory_mb: int = Field(1024, ge=64, le=MOST_MEMORY_MB, description="Address-space limit of an episode's process.")

    @field_validator("url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if "@" in parts.netloc:
            raise ValueError("must be an address without a user name or password")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("must look like http://host:port")
        return value

    @model_validator(mode="after")
    def _address_of_a_server(self) -> Self:
        if (self.name == OPENENV) != (self.url is not None):
            reason = "needs an address" if self.url is None else "is a class; only openenv has an address"
            raise ValueError(f"url: environment.name = {self.name!r} {reason}")
        return self

    @property
    def multi_turn(self) -> bool:
        """Whether an environment takes part; without one a response is a single turn."""
        return self.name != SINGLE_TURN

    @property
    def observation_tokens(self) -> int:
        """Most tokens of an episode that the environment writes."""
        return (self.max_turns - 1) * self.max_observation_tokens if self.multi_turn else 0


class AgentConfig(EnvironmentConfig):
    """An agent with a loop of its own, which asks the policy by OpenAI's API (docs/agents.md). It takes none
    of action_field, observation_field and max_observation_tokens."""

    refused: ClassVar[tuple[str, ...]] = ("action_field", "observation_field", "max_observation_tokens")

    name: Literal["agent"] = AGENT
    command: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), max_length=1000, description="Program and arguments that start the agent; the problem is its input."
    )
    function: str | None = Field(
        None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="Or a function, as `module:function`."
    )
    url: str | None = Field(None, description="Or the address of an agent that runs; each episode is a POST.")
    host: str = Field("127.0.0.1", description="Address of this machine at which the agent reaches the policy.")
    tool_parser: str | None = Field(
        None, description="vLLM's parser of the policy's tool calls, such as `hermes`; needed by agents with tools."
    )
    max_request_tokens: Tokens | None = Field(None, description="Most sampled tokens of an answer; none: the rest.")
    max_turns: int = Field(16, ge=1, le=10_000, description="Requests of an episode; the next one ends it.")
    deadline_s: Deadline = Field(60.0, description="Time limit of the agent from an answer to its next request.")
    workers: Processes = Field(64, description="Agents that compute at the same time.")
    memory_mb: int = Field(4096, ge=64, le=MOST_MEMORY_MB, description="Address-space limit of each of its processes.")

    @model_validator(mode="after")
    def _address_of_a_server(self) -> Self:
        if sum(map(bool, (self.command, self.function, self.url))) != 1:
            raise ValueError("needs how the agent starts; set one of command, function and url")
        for name in self.refused:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f'{name} means nothing for environment.name = "{AGENT}"; remove it')
        return self

    @property
    def observation_tokens(self) -> int:
        """Nothing is reserved: an agent's messages take what `model.max_length` leaves."""
        return 0


AnyEnvironment = Annotated[
    EnvironmentConfig,
    Choice(
        "environments",
        "environment",
        EnvironmentConfig,
        classes=(EnvironmentConfig, AgentConfig),
        built_in=OWN_ENVIRONMENTS,
        inner=union_by_name(EnvironmentConfig, AgentConfig),
        plain=True,
    ),
]


HTTP: Final = "http"
LENGTH_PENALTY: Final = "length_penalty"
OWN_REWARDS = ("correctness", "format", "environment", LENGTH_PENALTY, HTTP)
_OTHER_METRICS = ("mean", "std", "zero_variance_fraction", "no_signal", "http_calls", "http_s", "http_cache_hits")
"""`reward/…` that are no component."""


def _usable_weight(value: float) -> float:
    if not math.isfinite(value) or value == 0.0:
        raise ValueError("must be a finite number other than 0; remove the component to do without it")
    return value


Weight = Annotated[float, AfterValidator(_usable_weight)]


class RewardConfig(Settings):
    """A list: one `[[verifier.rewards]]` a component; the reward is their weighted sum (docs/evaluation.md)."""

    implementation: ClassVar[str]
    """Of a subclass: `module:Class` of the component; the class takes these settings."""

    name: str = Field(
        "correctness",
        description="`correctness`, `format`, `environment` (what the environment gave), `length_penalty`, `http`, the "
        "name of an installed component, or a class as `package.module:Class`.",
    )
    weight: Weight = Field(1.0, description="Factor of the component in the sum.")

    @model_validator(mode="before")
    @classmethod
    def _nothing_of_http(cls, values: Any) -> Any:
        http_only = {*HttpRewardConfig.model_fields} - {*cls.model_fields}
        if misplaced := sorted(http_only.intersection(values)) if isinstance(values, dict) else ():
            raise ValueError(f'{", ".join(misplaced)}: only for name = "{HTTP}"; remove it or set that name')
        return values

    @property
    def label(self) -> str:
        """Name of its metric and of its value in samples.jsonl: the name, or the class without its module."""
        return self.name.rpartition(":")[2]


class LengthPenaltyConfig(RewardConfig):
    """DAPO's soft penalty of long responses: 0, then falling evenly to −1."""

    name: Literal["length_penalty"] = LENGTH_PENALTY
    max_tokens: Tokens = Field(description="L_max: length from which on it is −1; as rollout.max_new_tokens.")
    buffer_tokens: Tokens = Field(description="L_cache: the last tokens before max_tokens, in which it falls.")

    @model_validator(mode="after")
    def _buffer_within(self) -> Self:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(f"buffer_tokens = {self.buffer_tokens} exceeds max_tokens = {self.max_tokens}; lower it")
        return self


class HttpRewardConfig(Settings):
    """A component that a server computes (docs/http-rewards.md)."""

    name: Literal["http"] = HTTP
    label: str = Field(HTTP, pattern=r"^[A-Za-z][\w-]*$", description="Of its metric `reward/<label>` and in samples.")
    weight: Weight = Field(1.0, description="Factor of the component in the sum.")
    url: str = Field(description="Address that responses are posted to; the administrator must have listed it.")
    per: Literal["response", "group"] = Field(
        "response", description="What one request has: a response, or all of a group, for judges that rank them."
    )
    deadline_s: Deadline = Field(30.0, description="Time limit of one answer, with all attempts and the waits.")
    retries: int = Field(
        2, ge=0, le=1000, description="Further attempts after a failed connection or HTTP 429, 502, 503, 504."
    )
    concurrency: int = Field(64, ge=1, le=100_000, description="Requests that are made at the same time.")

    @field_validator("url")
    @classmethod
    def _plain_address(cls, value: str) -> str:
        if re.search(r"[\s,\\\x00-\x1f]", value):
            raise ValueError("has a blank, comma, backslash or control character; encode it as %20, %2C, …")
        try:
            parts = urlsplit(value)
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            known = False
        if not known:
            raise ValueError("must look like https://host:port/path")
        if parts.username is not None or parts.password is not None:
            raise ValueError("has credentials; the administrator gives a token in GXPO_REWARD_TOKEN_FILE")
        if "#" in value:
            raise ValueError("has a fragment, which is not sent; remove it")
        return value


_OwnReward = union_by_name(RewardConfig, LengthPenaltyConfig, HttpRewardConfig)
AnyReward = Annotated[
    RewardConfig | LengthPenaltyConfig | HttpRewardConfig,
    Choice("rewards", "verifier.rewards", RewardConfig, built_in=OWN_REWARDS, inner=_OwnReward, plain=True),
]


class VerifierConfig(Settings):
    """Scoring of responses in killable processes."""

    workers: Processes = Field(2, description="Worker processes.")
    deadline_s: Deadline = Field(5.0, description="Time limit of one answer, after which its process is killed.")
    memory_mb: int = Field(2048, ge=256, le=MOST_MEMORY_MB, description="Address-space limit of a worker.")
    answer: Literal["auto", "any", "boxed"] = Field(
        "auto",
        description="What counts as the final answer. boxed: the last \\boxed{} alone; any: also what a sentence, the "
        "last line or the last number states. auto: boxed for training problems whose template or system prompt asks "
        "for it, else any (docs/evaluation.md).",
    )
    rewards: tuple[AnyReward, ...] = Field(
        (RewardConfig(),), max_length=100, description="Components of the reward; their weighted sum is the reward."
    )
    max_failed_fraction: Fraction = Field(0.2, description="Stop when more verdicts of a step are timeout or error.")

    @field_validator("rewards")
    @classmethod
    def _told_apart(cls, value: tuple[AnyReward, ...]) -> tuple[AnyReward, ...]:
        if not value:
            raise ValueError("is empty; name at least one reward, such as correctness")
        labels = [reward.label for reward in value]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(
                f"two rewards are called {twice[0]}, so their metrics would be one; rename a class or set label"
            )
        others = {reward.label for reward in value if reward.name != "correctness"}
        if taken := sorted(others & {*_OTHER_METRICS, "correctness"}):
            raise ValueError(f"reward/{taken[0]} is another metric; rename the class or set another label")
        return value

    def judging(self, prompt: Prompt) -> VerifierConfig:
        """The same with the components that judge this problem."""
        chosen = tuple(reward for reward in self.rewards if reward.label in prompt.rewards)
        return self.model_copy(update={"rewards": chosen}) if prompt.rewards else self

    @property
    def worker_rewards(self) -> tuple[RewardConfig, ...]:
        """Components that the worker processes compute; none when correctness is the only reward, which follows from
        the verdict: 1 for correct, 0 for wrong, or what the environment gave."""
        if [reward.label for reward in self.rewards] == ["correctness"]:
            return ()
        return tuple(reward for reward in self.rewards if isinstance(reward, RewardConfig))

    @property
    def http_rewards(self) -> tuple[HttpRewardConfig, ...]:
        """Components that a server computes."""
        return tuple(reward for reward in self.rewards if isinstance(reward, HttpRewardConfig))


class EvaluationConfig(Settings):
    """Benchmarks during and after training."""

    benchmarks: tuple[str, ...] = Field(
        ("word_problems",),
        max_length=100,
        description="`word_problems`, `arithmetic_skill`, `math500`, `amc23`, `gsm8k`, `minerva`, `olympiadbench`, "
        "`aime24`, or paths of .jsonl, .csv or .parquet files. Left out: embedded data sources, else none.",
    )
    data_root: str | None = Field(
        None, description="Folder with local copies: `<name>.jsonl` or a folder `<name>` in hub layout; none: the hub."
    )
    prompt_field: str | None = Field(None, description="Of the rows of files; none: data.prompt_field.")
    answer_field: str | None = Field(None, description="Of the rows of files; none: data.answer_field.")
    template: Template = Field(
        "auto",
        description="As data.template; `auto`: plain for embedded tasks, else data.template, and boxed where that is "
        "auto too.",
    )
    every_steps: Steps = Field(10, description="0: only at the end.")
    every_backward_passes: int | None = Field(
        None,
        ge=1,
        le=MOST_STEPS,
        description="In place of every_steps: after the step that reaches a multiple, with and without a look-ahead.",
    )
    samples_per_prompt: int = Field(4, ge=1, le=100_000, description="n, for pass@k up to n.")
    num_problems: int | None = Field(
        256,
        ge=1,
        le=MOST_STEPS,
        description="Evaluate the first so many problems of each, in every evaluation; none: all.",
    )
    full_at_end: bool = Field(
        False,
        description="At the end all problems of each file or named set, as `eval/<benchmark>/full/…`. Embedded tasks "
        "have no more than num_problems.",
    )
    max_new_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS, description="none: rollout.max_new_tokens.")
    temperature: Temperature = Field(1.0, description="pass@k needs distinct samples.")
    top_p: float = Field(1.0, gt=0, le=1, description="Sample among the likeliest tokens of this total probability.")
    top_k: int = Field(0, ge=0, le=MOST_STEPS, description="Sample among so many of the likeliest tokens; 0: all.")
    min_p: float = Field(0.0, ge=0, le=1, description="Least probability of a token, as a fraction of the largest.")
    stop: tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...] = Field(
        (), max_length=100, description="Texts that end a response, without themselves; for models that do not stop."
    )
    at_start: bool = Field(True, description="Also before the first step.")
