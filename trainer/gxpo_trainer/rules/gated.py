"""What rules share that look K steps ahead until their gate fires."""

from __future__ import annotations

from typing import Any

from gxpo_trainer.config import GateConfig
from gxpo_trainer.rules.gate import Gate


class GatedLookAhead:
    """The gate, the number of steps that it has judged, and both in a checkpoint. k: steps of the look-ahead."""

    def __init__(self, k: int, gate: GateConfig) -> None:
        self._k = k
        self.gate = Gate(gate)
        self.num_steps = 0

    @property
    def look_ahead_steps(self) -> int:
        """See rules.base.LookAheadRule."""
        return self._k if self.gate.active else 0

    def state_dict(self) -> dict[str, Any]:
        return {"gate": self.gate.state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.gate.load_state_dict(state["gate"])
        self.num_steps = state["num_steps"]
