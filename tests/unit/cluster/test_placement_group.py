"""Bundles of a run's placement group and the bundle of each actor; the reservation itself is in test_two_nodes.py."""

from __future__ import annotations

import pytest

from gxpo_trainer.cluster.placement import Placement
from gxpo_trainer.cluster.placement_group import RunPlacementGroup
from gxpo_trainer.config import RunConfig


def placement(device: str = "cpu", **settings: object) -> Placement:
    config = RunConfig.model_validate({"placement": {"device": "cpu", **settings}})
    return Placement(config, "gpu" if device == "gpu" else "cpu", 1, 1)


def test_pack_gives_each_rank_a_bundle_and_one_to_sampler_and_verifier() -> None:
    decided = placement(learner_ranks=2, learner_cpus=0.5, sampler_cpus=0.75, verifier_cpus=0.25)
    assert decided.bundles() == ([{"CPU": 0.5}, {"CPU": 0.5}, {"CPU": 1.0}], "PACK")


def test_split_gives_all_ranks_one_bundle_on_another_node_than_the_sampler() -> None:
    decided = placement("gpu", learner_ranks=4, learner_cpus=2, strategy="split")
    assert decided.bundles() == ([{"CPU": 8.0, "GPU": 4.0}, {"CPU": 1.0, "GPU": 1.0}], "STRICT_SPREAD")


@pytest.mark.parametrize(("num_learner", "bundles"), [(3, [0, 1, 2]), (1, [0, 0, 0])])
def test_each_rank_uses_its_bundle_and_the_sampler_the_last(num_learner: int, bundles: list[int]) -> None:
    group = RunPlacementGroup(object(), num_learner)
    strategies = [group.learner_options(rank)["scheduling_strategy"] for rank in range(3)]
    assert [strategy.placement_group_bundle_index for strategy in strategies] == bundles
    assert group.sampler_options()["scheduling_strategy"].placement_group_bundle_index == num_learner


def test_on_one_node_nothing_is_reserved() -> None:
    decided = placement()
    for options in (decided.learner_options(0), decided.sampler_options(), decided.verifier_options()):
        assert "scheduling_strategy" not in options
