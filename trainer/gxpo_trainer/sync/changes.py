"""How many published weights a step has changed."""

from __future__ import annotations

import torch

from gxpo_trainer.sync.buckets import WeightBucket, tensors_of

MOST_SAMPLED = 1 << 23
"""Weights that are compared, evenly spaced; all of them up to this number."""


class ChangeMeter:
    """Compares a sample of each version's elements with the version before."""

    def __init__(self, num_elements: int) -> None:
        self._stride = -(-num_elements // MOST_SAMPLED)
        self._previous: dict[tuple[str, int], torch.Tensor] = {}
        self._present: dict[tuple[str, int], torch.Tensor] = {}
        self._version: int | None = None
        self._changed = self._compared = 0

    def add(self, bucket: WeightBucket, buffer: torch.Tensor) -> float | None:
        """Compare a bucket. After the last one: the fraction of elements that changed, None for the first version."""
        if bucket.index == 0:
            if bucket.version != self._version:  # else it is published again
                self._previous, self._version = self._present, bucket.version
            self._present = {}
            self._changed = self._compared = 0
        for entry, tensor in tensors_of(bucket, buffer):
            key, sampled = (entry.name, entry.first_row), tensor.reshape(-1)[:: self._stride].clone()
            before = self._previous.get(key)
            if before is not None and before.shape == sampled.shape:
                self._changed += int((before != sampled).sum())
                self._compared += sampled.numel()
            self._present[key] = sampled
        if not bucket.last:
            return None
        return self._changed / self._compared if self._compared else None
