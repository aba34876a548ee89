"""Sampling requests, their results, and the settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from gxpo_trainer.config import LoraConfig
from gxpo_trainer.config.tasks import EnvironmentConfig
from gxpo_trainer.data.prompts import fill_template, json_extra
from gxpo_trainer.environments.contract import Problem
from gxpo_trainer.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """How the episodes of a request begin. max_prompt_tokens: of their first messages; None: what the model allows."""

    problem: Problem
    seed: int
    max_prompt_tokens: int | None = None

    @classmethod
    def of(cls, prompt: Prompt, template: str, seed: int, max_prompt_tokens: int | None = None) -> EpisodeStart:
        """template: see `fill_template`."""
        problem = Problem(prompt.id, fill_template(prompt, template), prompt.gold, json_extra(prompt))
        return cls(problem, seed, max_prompt_tokens)


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A prompt and the number of responses to sample.

    prompt_token_ids: int32[length], the templated prompt. seed: None draws from the engine's generator (faster); a
    number gives each sample its own generator, seeded by it and the sample's index. sampling: None for those of the
    stream. episode: None without an environment; with one its first messages are the prompt.
    """

    prompt: Prompt
    prompt_token_ids: npt.NDArray[np.int32]
    num_samples: int
    seed: int | None = None
    sampling: SamplingSettings | None = None
    episode: EpisodeStart | None = None


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """max_new_tokens: most tokens that a response samples. temperature: > 0, or 0 for greedy decoding in an evaluation.

    ignore_eos: sample past the end-of-sequence token, so that every response has max_new_tokens (for benchmarks).
    """

    max_new_tokens: int
    temperature: float = 1.0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """Settings of the sampling engine.

    model: a local transformers folder or a hub name. max_length: prompt plus response, in tokens. environment: of every
    sample; None where each is a single turn.
    adapter: sample with a LoRA adapter that syncs replace, None for full weights. sleep_mode: the engine can free
    its GPU between phases (vLLM ignores that on CPUs). initial_version: version of the weights in the folder, None when
    a sync must come first. deterministic: a seeded sample does not depend on concurrent requests.
    """

    model: str
    max_length: int
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["cpu", "gpu"] = "cpu"
    threads: int = 1
    seed: int = 0
    max_num_seqs: int = 512
    cpu_kv_cache_gib: int = 1
    gpu_memory_utilization: float = 0.4
    enforce_eager: bool = True
    tensor_parallel: int = 1
    trust_remote_code: bool = False
    adapter: LoraConfig | None = None
    sleep_mode: bool = False
    deterministic: bool = False
    initial_version: int | None = None
    environment: EnvironmentConfig | None = None


@dataclass(frozen=True, slots=True)
class FinishedGroups:
    """Groups that an engine has completed, with the indices of their requests."""

    indices: tuple[int, ...]
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Last item of an engine's stream. busy_s: time spent in engine steps."""

    busy_s: float
