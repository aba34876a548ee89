"""Sampling requests of the embedded task, the tokens that engines return for them, and runs that must be equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gxpo_trainer.config import RunConfig
from gxpo_trainer.data.prompts import load_prompts, tokenize_prompts
from gxpo_trainer.learner.models import load_tokenizer
from gxpo_trainer.reporting.reading import read_evaluations, read_metrics
from gxpo_trainer.rollout.pool import Collected
from gxpo_trainer.rollout.sources import request_seed
from gxpo_trainer.rollout.vllm_driver import SampleRequest


def requests(config: RunConfig, count: int, num_samples: int = 4) -> list[SampleRequest]:
    """Seeded requests of the first prompts of the run's data."""
    prompts = tokenize_prompts(load_prompts(config.data, 0).prompts, load_tokenizer(config.model), "{problem}", 96)
    return [
        SampleRequest(prompt, ids, num_samples, request_seed(0, 1, 0, place))
        for place, (prompt, ids) in enumerate(zip(prompts.prompts[:count], prompts.token_ids[:count], strict=True))
    ]


def token_logprobs(
    model: Any, prompt: npt.NDArray[np.int32], response: npt.NDArray[np.int32], temperature: float = 1.0
) -> npt.NDArray[np.float64]:
    """log π of each response token given all before it, by a transformers model: [length], in the model's precision."""
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    with torch.no_grad():
        table = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature, dim=-1)
    logprobs: npt.NDArray[np.float64] = table.gather(1, ids[len(prompt) :, None])[:, 0].numpy()
    return logprobs


def tokens(collected: Collected) -> list[list[list[int]]]:
    """Token ids by request and sample."""
    return [[sample.token_ids.tolist() for sample in group.group.samples] for group in collected.groups]


def trained_rows(out: Path) -> list[dict[str, Any]]:
    """The metrics of the steps that updated the policy."""
    return [row for row in read_metrics(out) if "update/backward_passes" in row["metrics"]]


BY_THE_CLOCK = ("time/", "system/", "rollout/tokens_per_s", "rollout/engine_idle_fraction")


def history(out: Path) -> list[dict[str, float]]:
    """Metrics by step without what the clock and the machine decide."""
    return [
        {
            name: value
            for name, value in row["metrics"].items()
            if not name.startswith(BY_THE_CLOCK) and name != "update/repeated_passes_total"
        }
        for row in read_metrics(out)
    ]


def assert_equal_to_the_bit(out: Path, whole: Path) -> None:
    """Metrics, evaluations and the last policy of two runs."""
    assert history(out) == history(whole)
    scores = [[(row["step"], row["per_problem"]) for row in read_evaluations(folder)] for folder in (out, whole)]
    assert scores[0] == scores[1]
    last = max(path.name for path in (whole / "checkpoints").iterdir())
    final = [folder / "checkpoints" / last / "policy" / "model.safetensors" for folder in (out, whole)]
    assert final[0].read_bytes() == final[1].read_bytes()
