"""Every error that gxpo raises on purpose.

GxpoError                      exit code 1
├── ConfigError                exit code 2: a setting is unknown, contradictory or impossible here
├── DataError                  exit code 2: a data file is missing, empty or malformed (names file and line)
├── CheckpointError            exit code 2: a checkpoint is truncated, altered or of another run
└── TrainingError              a run that had started cannot go on; `reason` is one of REASONS
    ├── WeightSyncMismatch     sampler and learner disagree about the weights
    │   └── WeightsGone        they were published and cannot be reached; publishing anew helps
    ├── Diverged               the loss or its gradient is not finite, several steps in a row
    └── VerifierFailed         too many verdicts are `timeout` or `error` to trust the reward

LearnerDied is no GxpoError: the controller catches it and continues from the last checkpoint.
"""

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
    "training_error",
)
"""Why a run failed. The words are final: the service stores them and the dashboard shows them."""


class GxpoError(Exception):
    """Base of all errors that carry a message for the person who started the run."""

    exit_code = 1
    reason = "training_error"


class ConfigError(GxpoError):
    """A setting cannot be used. The message names the setting, its value and the fix."""

    exit_code = 2
    reason = "invalid_config"


class DataError(GxpoError):
    """A data file cannot be used. The message names the file and, where there is one, the line."""

    exit_code = 2
    reason = "invalid_config"


class CheckpointError(GxpoError):
    """A checkpoint cannot be loaded; nothing was overwritten."""

    exit_code = 2
    reason = "invalid_config"


class TrainingError(GxpoError):
    """A run that had started cannot go on."""

    def __init__(self, message: str, *, reason: str = "training_error") -> None:
        if reason not in REASONS:
            raise ValueError(f"unknown failure reason {reason!r}")
        super().__init__(message)
        self.reason = reason


class WeightSyncMismatch(TrainingError):
    """The sampler does not hold the learner's weights; the message carries both figures."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="weight_sync_mismatch")


class WeightsGone(WeightSyncMismatch):
    """Published weights cannot be had any more, or not from where the sampler is; publishing them anew helps."""


class Diverged(TrainingError):
    """Loss or gradient norm was NaN or infinite in too many consecutive steps."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="diverged")


class VerifierFailed(TrainingError):
    """The share of verdicts `timeout` and `error` passed the limit set in `verifier`."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="verifier_failed")


class LearnerDied(Exception):
    """A learner process ended in mid-call (killed, out of memory). The controller recovers from a checkpoint."""
