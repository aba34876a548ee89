"""The learner's files: what one cut of the parameters wrote is read into any other."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from gxpo_trainer.config.io import load_preset
from gxpo_trainer.errors import CheckpointError
from gxpo_trainer.learner.checkpoint import Layout, restore, write
from gxpo_trainer.learner.rank import LearnerRank
from gxpo_trainer.learner.shards import Segment

CPU = torch.device("cpu")
SHAPES = {"a": (2, 3), "b": (5,), "c": (1, 1)}


def elements(shapes: dict[str, tuple[int, ...]]) -> dict[str, list[float]]:
    """Parameter number p has the elements 100 p, 100 p + 1, …"""
    return {name: [100.0 * p + i for i in range(torch.Size(s).numel())] for p, (name, s) in enumerate(shapes.items())}


def held(cut: str, rank: int, ranks: int, shapes: dict[str, tuple[int, ...]] = SHAPES, *, empty: bool = False) -> Any:
    """What a rank holds, as `learner.shards.Shards` shows it: flat tensors and what is in them.

    Cut here by lists of Python: `whole`, `flat` (stages 1, 2) and `sliced` (stage 3).
    """
    values = elements(shapes)
    every = [(name, i) for name, numbers in values.items() for i in range(len(numbers))]
    if cut == "whole":
        mine = [[(name, i) for i in range(len(numbers))] for name, numbers in values.items()]
    elif cut == "flat":
        size = -(-len(every) // ranks)
        mine = [every[rank * size : (rank + 1) * size]]
    else:
        mine = [[]]
        for name, numbers in values.items():
            size = -(-len(numbers) // ranks)
            mine[0] += [(name, i) for i in range(len(numbers))][rank * size : (rank + 1) * size]
    tensors = [torch.tensor([0.0 if empty else values[name][i] for name, i in part]) for part in mine]
    # One segment an element: how a cut is described does not matter.
    segments = [[Segment(name, i, offset, 1) for offset, (name, i) in enumerate(part)] for part in mine]
    moments = {"exp_avg": [tensor + 0.5 for tensor in tensors]}
    methods = {"parameters": lambda: tensors, "segments": lambda: segments, "shapes": lambda: shapes}
    shards = SimpleNamespace(**methods, step=7, moments=lambda: moments, replicated=cut == "whole")
    shards.set_step = partial(setattr, shards, "step")
    return shards


def layout(ranks: int, stage: int = 0, **others: Any) -> Layout:
    settings = {"precision": "fp32", "optimizer": "adamw", "lora_rank": 0, **others}
    return Layout(world_size=ranks, zero_stage=stage, **settings)


def save(folder: Path, cut: str, ranks: int, shapes: dict[str, tuple[int, ...]] = SHAPES, **others: Any) -> None:
    folder.mkdir()
    for rank in range(ranks):
        write(folder, rank, held(cut, rank, ranks, shapes), layout(ranks, **others), 1e-3, CPU)


CUTS = st.sampled_from(["whole", "flat", "sliced"])
SIZES = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple), min_size=1, max_size=5)


@given(old=CUTS, new=CUTS, old_ranks=st.integers(1, 5), ranks=st.integers(1, 5), sizes=SIZES)
def test_any_cut_is_read_into_any_other(
    tmp_path_factory: pytest.TempPathFactory, old: str, new: str, old_ranks: int, ranks: int, sizes: list[Any]
) -> None:
    shapes = {f"p{index}": size for index, size in enumerate(sizes)}
    folder = tmp_path_factory.mktemp("state") / "learner"
    save(folder, old, old_ranks, shapes)
    for rank in range(ranks):
        subject, expected = held(new, rank, ranks, shapes, empty=True), held(new, rank, ranks, shapes)
        subject.set_step(0)
        restore(folder, rank, subject, layout(ranks), CPU)
        for kind in (lambda h: h.parameters(), lambda h: h.moments()["exp_avg"]):
            assert all(torch.equal(a, b) for a, b in zip(kind(subject), kind(expected), strict=True))
        assert subject.step == 7


def test_replicas_are_written_once(tmp_path: Path) -> None:
    save(tmp_path / "learner", "whole", 3)
    sizes = [(tmp_path / "learner" / f"rank-{rank}.safetensors").stat().st_size for rank in range(3)]
    names = [f for f in (tmp_path / "learner").iterdir() if '"segments": []' in f.read_text(errors="ignore")]
    assert sizes[1] == sizes[2] < sizes[0]
    assert len(names) == 2


def test_each_rank_gets_its_random_state_back(tmp_path: Path) -> None:
    (tmp_path / "learner").mkdir()
    drawn = []
    for rank in range(2):
        torch.manual_seed(rank)
        write(tmp_path / "learner", rank, held("flat", rank, 2), layout(2), 1e-3, CPU)
        drawn.append(torch.rand(3))
    for rank, expected in ((0, drawn[0]), (1, drawn[1]), (2, drawn[0])):
        restore(tmp_path / "learner", rank, held("flat", rank, 3, empty=True), layout(3), CPU)
        assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("saved", "now", "shapes", "reason"),
    [
        ({"precision": "bf16"}, {}, SHAPES, "has precision = 'bf16', this learner 'fp32'"),
        ({}, {"optimizer": "sgd"}, SHAPES, "has optimizer = 'adamw', this learner 'sgd'"),
        ({"lora_rank": 8}, {"lora_rank": 4}, SHAPES, "has lora_rank = 8, this learner 4"),
        ({}, {}, {**SHAPES, "b": (6,)}, r"of another model: it has \(5,\) for b, this learner \(6,\); set model.path"),
        ({}, {}, {"a": (2, 3), "b": (5,)}, r"of another model: it has \(1, 1\) for c, this learner nothing"),
    ],
)
def test_a_state_of_another_kind_is_refused_before_anything_changes(
    tmp_path: Path, saved: Any, now: Any, shapes: Any, reason: str
) -> None:
    save(tmp_path / "learner", "flat", 2, **saved)
    subject = held("whole", 0, 1, shapes, empty=True)
    with pytest.raises(CheckpointError, match=reason):
        restore(tmp_path / "learner", 0, subject, layout(1, **now), CPU)
    assert not any(tensor.any() for tensor in subject.parameters())


def test_a_state_without_the_part_of_a_rank_is_refused_before_anything_changes(tmp_path: Path) -> None:
    save(tmp_path / "learner", "flat", 2)
    file = tmp_path / "learner" / "rank-1.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "segments": []}))
    subject = held("whole", 0, 1, empty=True)
    with pytest.raises(CheckpointError, match="lacks a part of b; use another checkpoint"):
        restore(tmp_path / "learner", 0, subject, layout(1), CPU)
    assert not any(tensor.any() for tensor in subject.parameters())


def test_a_rank_that_was_never_set_up_closes_without_a_second_error() -> None:
    LearnerRank(load_preset("demo"), 0, 1).close()
