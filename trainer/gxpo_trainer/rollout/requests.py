"""What is asked of the sampler, and what the sampler is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from gxpo_trainer.types import Prompt


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One prompt to be answered `num_samples` times.

    prompt_token_ids: int32[length], the templated prompt. seed: None for the fast path, which draws from the
    engine's own stream; a number gives each sample its own stream, derived from it and the sample's index.
    """

    prompt: Prompt
    prompt_token_ids: npt.NDArray[np.int32]
    num_samples: int
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """max_new_tokens: longest response. temperature: > 0, or 0 for greedy decoding in an evaluation.

    ignore_eos: go on past an end token, so that every response has max_new_tokens (measurements at equal work).
    """

    max_new_tokens: int
    temperature: float = 1.0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """What the engine is built from.

    model: a local transformers folder (or a hub name). max_length: prompt plus response, in tokens.
    initial_version: the version that the folder's weights count as, None when a sync must come first.
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
    weight_transfer: Literal["shared_memory", "nccl"] = "shared_memory"
    initial_version: int | None = None
