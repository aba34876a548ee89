"""What gxpo adds to vLLM's workers (`worker_extension_cls`): one process per device of an engine.

Errors are returned as `WorkerError`, because an exception in a worker process would end the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gxpo_trainer.errors import ConfigError, WeightSyncMismatch
from gxpo_trainer.sync.adapters import verify_adapter
from gxpo_trainer.sync.buckets import SyncReport, WeightBucket
from gxpo_trainer.sync.receiver import WeightReceiver
from gxpo_trainer.sync.vllm_weights import VllmWeights


@dataclass(frozen=True, slots=True)
class WorkerError:
    """What a worker could not do. Not an exception itself: of a returned one vLLM's executor of several workers makes a
    RuntimeError of its own."""

    error: Exception


class WeightSyncExtension:
    """Mixed into vLLM's worker class; called through `collective_rpc`."""

    model_runner: Any
    device: Any

    @property
    def gxpo_receiver(self) -> WeightReceiver:
        found = vars(self).get("_gxpo_receiver")
        if found is None:
            model = self.model_runner.get_model()
            dtype = self.model_runner.model_config.dtype
            found = WeightReceiver(VllmWeights(model, dtype), self.device)
            self._gxpo_receiver = found
        return found

    def gxpo_receive(self, bucket: WeightBucket) -> SyncReport | WorkerError | None:
        """See WeightReceiver.receive."""
        try:
            return self.gxpo_receiver.receive(bucket)
        except (WeightSyncMismatch, ConfigError, ValueError) as error:
            return WorkerError(error)

    def gxpo_verify_checkpoint(self, folder: str) -> int | WorkerError:
        """See WeightReceiver.verify_checkpoint."""
        try:
            return self.gxpo_receiver.verify_checkpoint(Path(folder))
        except WeightSyncMismatch as error:
            return WorkerError(error)

    def gxpo_verify_adapter(
        self, adapter_id: int, folder: str, checksums: dict[str, int], scaling: float
    ) -> int | WorkerError:
        """See adapters.verify_adapter."""
        manager = self.model_runner.lora_manager._adapter_manager
        try:
            model = self.model_runner.get_model()
            return verify_adapter(model, manager, adapter_id, Path(folder), checksums, scaling)
        except (WeightSyncMismatch, ConfigError) as error:
            return WorkerError(error)

    def gxpo_join_broadcast(self, address: str, port: int, first_member: int, size: int) -> WorkerError | None:
        """Join the broadcast group as member `first_member` + this worker's rank."""
        try:
            self.gxpo_receiver.join(address, port, first_member + int(vars(self).get("rank", 0)), size)
        except WeightSyncMismatch as error:
            return WorkerError(error)
        return None
