"""The families of models on tiny random ones: those that train give the log-probabilities of transformers' own forward
pass in every layout of rows, the others are refused by the table before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_families import FAMILIES, save_family
from support.tiny_policy import by_sequence, plain_logprobs, random_batch, relative_difference

from gxpo_trainer.algo.packing import Layout, pack
from gxpo_trainer.config import ModelConfig, RunConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.learner.logprobs import PolicyModule, can_share_prompts, layer_types
from gxpo_trainer.learner.models import config_json, load_policy
from gxpo_trainer.planner import architectures
from gxpo_trainer.planner.architectures import TRAINS, check_architecture

TRAINED = [family for family in FAMILIES if architectures.FAMILIES.get(family) == TRAINS]
LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "shared")
WINDOW = 4
"""Shorter than the sequences of the batch."""


@pytest.mark.parametrize("family", TRAINED)
def test_a_family_that_trains_has_transformers_own_log_probabilities(family: str, tmp_path: Path) -> None:
    windowed = family in ("mistral", "gemma3_text")
    settings = {"sliding_window": WINDOW} if windowed else {}
    config = ModelConfig(path=str(save_family(tmp_path / family, family, **settings)))
    check_architecture(config_json(config), RunConfig(model=config))
    model = load_policy(config, precision="fp32").double()
    policy = PolicyModule(model)
    # Prompts are shared by an explicit mask, which would replace a window.
    shares = can_share_prompts("sdpa", layer_types(model.config))
    assert shares is not windowed
    with torch.no_grad():
        batch = random_batch(seed=3)
        expected = torch.cat([plain_logprobs(model, sequence)[0] for sequence in batch.sequences])
        for layout in LAYOUTS if shares else LAYOUTS[:2]:
            micros = pack(batch, token_budget=70, layout=layout, aggregation="token_mean", pad_id=0)
            actual = by_sequence([(micro.sequence_index, policy(micro, 1.0, False).logprobs) for micro in micros])
            assert relative_difference(actual, expected) < 1e-12, layout
        if not shares:  # a teacher gets the rows of the policy
            (micro, *_) = pack(batch, token_budget=70, layout="shared", aggregation="token_mean", pad_id=0)
            with pytest.raises(ValueError, match="needs full attention"):
                policy(micro, 1.0, False)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in TRAINED])
def test_a_family_that_does_not_train_is_refused_by_its_config_alone(family: str, tmp_path: Path) -> None:
    config = RunConfig(model=ModelConfig(path=str(save_family(tmp_path / family, family))))
    with pytest.raises(ConfigError, match=f"the architecture {family} .*; use a dense decoder-only model"):
        check_architecture(config_json(config.model), config)
