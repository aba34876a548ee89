"""The z-score gate that ends the look-ahead (GXPO, algorithm 1, lines on the stopping rule; SFPO, eq. 9).

Differs from the papers: the warm-up and ε are settings, the spread is the population std, and a third mode
re-arms the gate. Pure Python on floats: every rank sees the same value, so every rank decides the same.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from gxpo_trainer.config import GateConfig
from gxpo_trainer.types import Metrics


@dataclass
class GateState:
    """State of a gate. window: past values, oldest first."""

    active: bool = True
    window: list[float] = field(default_factory=list)
    shutoff_step: int | None = None
    cooldown: int = 0
    num_seen: int = 0
    """Number of values admitted so far: the warm-up may be longer than the window."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One value and the window before it; z is None during the warm-up."""

    value: float
    mean: float | None
    std: float | None
    z: float | None


class Gate:
    """Fires when z = (value − mean) / (std + ε) reaches τ; then the rule takes plain steps.

    Order: `collect` for each mini-batch of a training step, then `judge` once. `observe` compares the value with the
    window, decides, and only then adds the value to the window.
    """

    def __init__(self, settings: GateConfig) -> None:
        self.settings = settings
        self.state = GateState()
        self._collected: list[float] = []

    @property
    def active(self) -> bool:
        return self.state.active

    def read(self, value: float) -> Reading:
        """`value` compared with the current window, without changing any state."""
        window = self.state.window
        if not window:
            return Reading(value, None, None, None)
        mean = math.fsum(window) / len(window)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in window) / len(window))
        if self.state.num_seen < self.settings.warmup:
            return Reading(value, mean, std, None)
        spread = std + self.settings.epsilon
        z = (value - mean) / spread if spread > 0 else math.copysign(math.inf, value - mean) if value != mean else 0.0
        return Reading(value, mean, std, z)

    def collect(self, value: float) -> None:
        """Keep the value of one mini-batch for `judge`; non-finite values are ignored."""
        if math.isfinite(value):
            self._collected.append(value)

    def judge(self, step: int) -> Reading | None:
        """Observe the mean of the values collected since the last call; None when there are none."""
        values, self._collected = self._collected, []
        if not values:
            return None
        mean = math.fsum(values) / len(values)
        return self.observe(mean, step) if self.active else self.observe_inactive(mean)

    def observe(self, value: float, step: int) -> Reading:
        """Compare one value of an active step with the window, decide, and add it to the window.

        Non-finite values are ignored.
        """
        if not math.isfinite(value):
            return Reading(value, None, None, None)
        reading = self.read(value)
        if reading.z is not None and self._fires(reading.z):
            self.state.active = False
            self.state.shutoff_step = step
            self.state.cooldown = self.settings.rearm_after
        self._admit(value)
        return reading

    def observe_inactive(self, value: float) -> Reading | None:
        """`rearm` only: one step of the cool-down, compared with the window at the shut-off.

        The look-ahead is switched on again once the cool-down is over and z (|z| where the gate is two-sided) is below
        `rearm_threshold`. Until then the window is not updated: it describes the active phase.
        """
        if self.settings.mode != "rearm" or self.active or not math.isfinite(value):
            return None
        self.state.cooldown = max(0, self.state.cooldown - 1)
        reading = self.read(value)
        rearms = reading.z is not None and self._deviation(reading.z) < self.settings.rearm_threshold
        if self.state.cooldown == 0 and rearms:
            self.state.active = True
        return reading

    def metrics(self, reading: Reading | None) -> Metrics:
        """The `gate/…` metrics after this step."""
        out: Metrics = {"gate/active": float(self.active), "gate/threshold": self.settings.threshold}
        if self.state.shutoff_step is not None:
            out["gate/shutoff_step"] = float(self.state.shutoff_step)
        if reading is not None:
            named = {"value": reading.value, "mean": reading.mean, "std": reading.std, "z": reading.z}
            out.update({f"gate/{name}": value for name, value in named.items() if value is not None})
        return out

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = GateState(**state)

    def _fires(self, z: float) -> bool:
        # Finiteness first: an infinite τ never fires, not even on an infinite z.
        if self.settings.mode == "never" or not math.isfinite(self.settings.threshold):
            return False
        return self._deviation(z) >= self.settings.threshold

    def _deviation(self, z: float) -> float:
        """What both thresholds are compared with."""
        return abs(z) if self.settings.two_sided else z

    def _admit(self, value: float) -> None:
        self.state.num_seen += 1
        self.state.window.append(value)
        del self.state.window[: -self.settings.window]
