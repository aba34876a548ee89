"""Weights over the network: the publisher's buffer as one object of Ray's store, fetched by the sampler's node.

The bytes, their layout and their checksums are those of the shared-memory transport, so `WeightReceiver` proves both
in the same way. The object belongs to the learner's process and is lost with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import ray
import torch

from gxpo_trainer.errors import TrainingError, WeightsGone
from gxpo_trainer.sync.manifest import WeightManifest
from gxpo_trainer.sync.shared_memory import SharedMemoryPublisher


class ObjectStorePublisher:
    """Learner side between hosts. It takes the publisher of its host, which does the copying and the comparing.

    The object store of the learner's node holds one version and that of the sampler's one more; both take turns with
    what the sampler still reads, so each wants room for two.
    """

    def __init__(self, local: SharedMemoryPublisher) -> None:
        self._local = local
        self._reference: Any = None

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Put the tensors (transformers' names, any device) into the store. Raises TrainingError (disk_full)."""
        manifest = self._local.publish(version, named_tensors)
        # The version before can go: the sampler has taken it, and is never asked for it again.
        self._reference = None
        try:
            self._reference = ray.put(self._local.newest(manifest).numpy())
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            raise TrainingError(
                f"{manifest.num_bytes} bytes of weights do not fit into Ray's object store; start the workers with a "
                "larger --object-store-memory",
                reason="disk_full",
            ) from error
        return replace(manifest, buffer=None, reference=self._reference)


def fetch(manifest: WeightManifest) -> torch.Tensor:
    """uint8[num_bytes], read-only, from wherever the object lies. Raises WeightsGone when its owner has died."""
    try:
        published = ray.get(manifest.reference)
    except (ray.exceptions.ObjectLostError, ray.exceptions.OwnerDiedError) as error:
        raise WeightsGone(
            f"version {manifest.version} was published in Ray's object store and is gone from it with its learner"
        ) from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(published, dtype=torch.uint8)
