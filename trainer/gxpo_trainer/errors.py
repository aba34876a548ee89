"""Exceptions of gxpo. LearnerDied and Interrupted are no GxpoError: the controller catches them, to continue from the
last checkpoint or to save one."""

from __future__ import annotations

REASONS = (
    "invalid_config",
    "no_resources",
    "setup_failed",
    "out_of_memory",
    "disk_full",
    "verifier_failed",
    "weight_sync_mismatch",
    "diverged",
    "lost_heartbeat",
    "stalled",
    "training_error",
)
"""Failure reasons of a run. Stable: the service stores them and the dashboard shows them."""


class GxpoError(Exception):
    """Base of all errors with a message for the user. `reason` overrides the class's failure reason."""

    exit_code = 1
    reason = "training_error"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or type(self).reason


class ConfigError(GxpoError):
    """A setting cannot be used. The message names the setting, its value and the fix."""

    exit_code = 2
    reason = "invalid_config"


class DataError(GxpoError):
    """A data file cannot be used. The message names the file and, if known, the line."""

    exit_code = 2
    reason = "invalid_config"


class CheckpointError(GxpoError):
    """A checkpoint cannot be loaded; nothing was overwritten."""

    exit_code = 2
    reason = "invalid_config"


class TrainingError(GxpoError):
    """A started run cannot continue."""


class WeightSyncMismatch(TrainingError):
    """Sampler and learner hold different weights; the message has both checksums or the log-probability gap."""

    reason = "weight_sync_mismatch"


class WeightsUnavailable(WeightSyncMismatch):
    """Published weights no longer exist, or are unreachable from the sampler's node; publish them again."""


class Diverged(TrainingError):
    """Loss or gradient norm was NaN or infinite in too many consecutive steps."""

    reason = "diverged"


class Stalled(TrainingError):
    """A phase made no progress within its time-out; the message names both."""

    reason = "stalled"


class VerifierFailed(TrainingError):
    """The share of `timeout` and `error` verdicts exceeded `verifier.max_failed_fraction`."""

    reason = "verifier_failed"


class Interrupted(Exception):
    """SIGTERM arrived during a wait that may be given up: a checkpoint does not need what it would have returned."""


class LearnerDied(Exception):
    """A learner process died during a call (killed, out of memory). The controller recovers from a checkpoint."""
