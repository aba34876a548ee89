"""How weights reach the engines: what `auto` takes and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.engines import choose_transport
from gxpo_trainer.config.io import build
from gxpo_trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("requested", "device", "colocated", "one_node", "transport"),
    [
        # The fastest that the placement allows.
        ("auto", "gpu", True, True, "cuda_ipc"),
        ("auto", "gpu", False, True, "nccl"),
        ("auto", "cpu", False, True, "shared_memory"),
        ("auto", "cpu", False, False, "object_store"),
        ("nccl", "gpu", False, False, "nccl"),
        ("cuda_ipc", "gpu", True, True, "cuda_ipc"),
        ("shared_memory", "gpu", True, True, "shared_memory"),
        ("object_store", "gpu", False, False, "object_store"),
    ],
)
def test_a_transport_that_works(requested: Any, device: Any, colocated: bool, one_node: bool, transport: str) -> None:
    assert choose_transport(requested, device, colocated, one_node) == transport


@pytest.mark.parametrize(
    ("requested", "device", "colocated", "one_node", "why"),
    [
        ("nccl", "cpu", False, True, "needs GPUs"),
        ("cuda_ipc", "cpu", True, True, "needs GPUs"),
        ("nccl", "gpu", True, True, "rejects duplicate devices"),
        ("cuda_ipc", "gpu", False, True, "on the same GPUs"),
        ("shared_memory", "cpu", False, False, "on different nodes"),
        ("shared_memory", "gpu", True, False, "on different nodes"),
    ],
)
def test_a_transport_that_cannot_work(requested: Any, device: Any, colocated: bool, one_node: bool, why: str) -> None:
    with pytest.raises(ValueError, match=f'weight_transport = "{requested}" .*{why}.*set weight_transport = "auto"'):
        choose_transport(requested, device, colocated, one_node)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"colocate": True, "learner_ranks": 3, "samplers": 2},
            r"learner_ranks = 3 and samplers × tensor_parallel = 2 × 1 = 2; make them equal, or set colocate = false",
        ),
        ({"colocate": True, "learner_ranks": 2, "strategy": "split", "samplers": 2}, 'strategy = "split"'),
        ({"device": "cpu", "colocate": False, "weight_transport": "nccl"}, "needs GPUs"),
        ({"device": "cpu", "weight_transport": "cuda_ipc"}, 'needs GPUs, .* or device = "gpu" where GPUs join later'),
        ({"learner_ranks": 2, "weight_transport": "cuda_ipc"}, "on the same GPUs, but each has its own"),
        ({"device": "gpu", "colocate": True, "weight_transport": "nccl"}, "rejects duplicate devices"),
        (
            {"device": "cpu", "colocate": False, "strategy": "split", "weight_transport": "shared_memory"},
            "on different nodes",
        ),
        ({"colocate": "always"}, "placement.colocate"),
    ],
)
def test_contradictory_placement_is_refused_with_the_config(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        build({"placement": settings})


def test_a_transport_that_gpus_of_the_cluster_may_allow_is_left_to_them() -> None:
    for placement in ({}, {"colocate": False}, {"device": "gpu"}):
        build({"placement": {**placement, "weight_transport": "nccl"}})


def test_the_fewest_gpus_of_a_run_are_shared_ones() -> None:
    def gpus(**settings: Any) -> tuple[int, int]:
        placement = RunConfig.model_validate({"placement": settings}).placement
        return placement.num_gpus(colocated=placement.can_colocate), placement.num_gpus(colocated=False)

    assert gpus(learner_ranks=4, samplers=2, tensor_parallel=2) == (4, 8)
    assert gpus(learner_ranks=4, samplers=2, tensor_parallel=2, colocate=False) == (8, 8)
    assert gpus(learner_ranks=4, samplers=1) == (5, 5)
