"""Weight transport between hosts: each bucket as one object in Ray's object store.

Layout and checksums are those of the shared-memory transport, so engines verify both in the same way. An object is
owned by the learner's process and lost when that dies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ray
import torch

from gxpo_trainer.errors import TrainingError, WeightsUnavailable
from gxpo_trainer.weights.buckets import BucketPacker, WeightBucket, read_only_view
from gxpo_trainer.weights.transports import SharedMemoryPublisher


class ObjectStorePublisher:
    """Publishes through Ray's object store, on top of a shared-memory publisher that packs the buckets.

    The object stores of the learner's and of each engine's node need room for two buckets.
    """

    def __init__(self, local: SharedMemoryPublisher) -> None:
        self._local = local
        self._references: list[Any] = []

    def publish(self, packer: BucketPacker, version: int, index: int) -> WeightBucket:
        """Put the next bucket into the store. Raises TrainingError (disk_full)."""
        bucket = self._local.publish(packer, version, index)
        # Free the bucket before the previous one: its engines have loaded it.
        self._references = self._references[-1:]
        try:
            self._references.append(ray.put(self._local.buffer(bucket).numpy()))
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            raise TrainingError(
                f"cannot store {bucket.num_bytes} bytes of weights in Ray's object store; start the workers with a "
                "larger --object-store-memory",
                reason="disk_full",
            ) from error
        # A list keeps Ray from resolving the reference when the bucket is passed to an actor.
        return replace(bucket, transport="object_store", location=[self._references[-1]])

    def buffer(self, bucket: WeightBucket) -> torch.Tensor:
        """The newest bucket; see SharedMemoryPublisher.buffer."""
        return self._local.buffer(bucket)

    def close(self) -> None:
        self._references = []


def fetch(bucket: WeightBucket) -> torch.Tensor:
    """The published buffer, uint8[num_bytes], read-only. Raises WeightsUnavailable when the learner has died."""
    try:
        published = ray.get(bucket.location[0])
    except (ray.exceptions.ObjectLostError, ray.exceptions.OwnerDiedError) as error:
        raise WeightsUnavailable(
            f"weights version {bucket.version} was lost from Ray's object store when the learner died"
        ) from error
    return read_only_view(published)
