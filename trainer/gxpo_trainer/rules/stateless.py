"""What rules share that keep nothing between training steps."""

from __future__ import annotations

from typing import Any, ClassVar


class Stateless:
    """An empty state in checkpoints."""

    name: ClassVar[str]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"{self.name} has no state, but was given {sorted(state)}")
