"""Weight transport between hosts: the publisher's buffer as one object in Ray's object store.

Layout and checksums are those of the shared-memory transport, so `WeightReceiver` verifies both in the same way. The
object is owned by the learner's process and lost when that dies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import ray
import torch

from gxpo_trainer.errors import TrainingError, WeightsUnavailable
from gxpo_trainer.sync.manifest import WeightManifest, read_only_view
from gxpo_trainer.sync.shared_memory import SharedMemoryPublisher


class ObjectStorePublisher:
    """Publishes through Ray's object store, on top of a shared-memory publisher that copies and compares.

    The object stores of the learner's and the sampler's node each need room for two versions: the new one and the one
    that the sampler is still reading.
    """

    def __init__(self, local: SharedMemoryPublisher) -> None:
        self._local = local
        self._reference: Any = None

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Put the tensors (transformers' names, any device) into the store. Raises TrainingError (disk_full)."""
        manifest = self._local.publish(version, named_tensors)
        # The sampler never loads the previous version again, so free it first.
        self._reference = None
        try:
            self._reference = ray.put(self._local.newest(manifest).numpy())
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            raise TrainingError(
                f"cannot store {manifest.num_bytes} bytes of weights in Ray's object store; start the workers with a "
                "larger --object-store-memory",
                reason="disk_full",
            ) from error
        return replace(manifest, buffer=None, reference=self._reference)


def fetch(manifest: WeightManifest) -> torch.Tensor:
    """The published buffer, uint8[num_bytes], read-only. Raises WeightsUnavailable when the learner has died."""
    try:
        published = ray.get(manifest.reference)
    except (ray.exceptions.ObjectLostError, ray.exceptions.OwnerDiedError) as error:
        raise WeightsUnavailable(
            f"weights version {manifest.version} was lost from Ray's object store when the learner died"
        ) from error
    return read_only_view(published)
