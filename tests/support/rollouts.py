"""Sampling requests of the embedded task and the tokens that engines return for them."""

from __future__ import annotations

from gxpo_trainer.config import RunConfig
from gxpo_trainer.data.prompts import load_prompts, resolve_template, tokenize_prompts
from gxpo_trainer.learner.models import load_tokenizer
from gxpo_trainer.rollout.pool import Collected
from gxpo_trainer.rollout.requests import SampleRequest
from gxpo_trainer.rollout.sources import request_seed


def requests(config: RunConfig, count: int, num_samples: int = 4) -> list[SampleRequest]:
    """Seeded requests of the first prompts of the run's data."""
    template = resolve_template("auto", "word_problems")
    prompts = tokenize_prompts(load_prompts(config.data, 0).prompts, load_tokenizer(config.model), template, 96)
    return [
        SampleRequest(prompt, ids, num_samples, request_seed(0, 1, 0, place))
        for place, (prompt, ids) in enumerate(zip(prompts.prompts[:count], prompts.token_ids[:count], strict=True))
    ]


def tokens(collected: Collected) -> list[list[list[int]]]:
    """Token ids by request and sample."""
    return [[sample.token_ids.tolist() for sample in group.group.samples] for group in collected.groups]
