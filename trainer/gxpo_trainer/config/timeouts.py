"""Settings of `timeouts`: how long each phase may make no progress."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from gxpo_trainer.config.base import Settings

Phase = Literal["setup", "sampling", "verifying", "updating", "syncing", "evaluating", "checkpointing"]
"""Phases of a run as the time-outs distinguish them."""
_IDLE = re.compile(r", no progress for (\d+) min$")


def idle_phase(phase: str, minutes: int) -> str:
    """The phase with the whole minutes without progress, as heartbeats report it; 0: the phase alone."""
    return f"{phase}, no progress for {minutes} min" if minutes else phase


def idle_minutes(phase: str | None) -> int:
    """The minutes in a phase of `idle_phase`."""
    found = _IDLE.search(phase or "")
    return int(found[1]) if found else 0


class TimeoutsConfig(Settings):
    """Seconds without progress after which a phase has stalled: the process that hangs is ended and its work is done
    again. They change no result."""

    setup_s: float = Field(3600.0, gt=0, description="Loading model and data, or starting a process.")
    sampling_s: float = Field(1800.0, gt=0, description="No engine finished a group.")
    verifying_s: float = Field(900.0, gt=0, description="The verifier returned no verdicts after sampling.")
    updating_s: float = Field(3600.0, gt=0, description="One training step of the learner.")
    syncing_s: float = Field(900.0, gt=0, description="Packing or loading one bucket of weights.")
    evaluating_s: float = Field(1800.0, gt=0, description="No engine finished a problem of an evaluation.")
    checkpointing_s: float = Field(3600.0, gt=0, description="Writing or loading one checkpoint.")

    def limit_s(self, phase: Phase) -> float:
        limit: float = getattr(self, f"{phase}_s")
        return limit
