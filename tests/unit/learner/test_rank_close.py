"""Closing a rank whose `setup` failed."""

from __future__ import annotations

from gxpo_trainer.config.io import load_preset
from gxpo_trainer.learner.rank import LearnerRank


def test_a_rank_that_was_never_set_up_closes_without_a_second_error() -> None:
    LearnerRank(load_preset("demo"), 0, 1).close()
