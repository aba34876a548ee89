"""Resumable selection of each step's prompts: one permutation per epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gxpo_trainer.errors import CheckpointError


class PromptCursor:
    """Iterates over `num_prompts` prompts, each once per epoch, in an order determined by (seed, epoch).

    A draw that crosses the end of an epoch may contain a prompt twice.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool = True) -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts = {num_prompts}: must be at least 1")
        self._identity = {"num_prompts": num_prompts, "seed": seed, "shuffle": shuffle}
        self.epoch = 0
        self.position = 0
        self._order = self._permutation(0)

    def next(self, count: int) -> npt.NDArray[np.int64]:
        """The next `count` prompt indices, shape [count]."""
        if count < 1:
            raise ValueError(f"count = {count}: must be at least 1")
        parts: list[npt.NDArray[np.int64]] = []
        while count > 0:
            part = self._order[self.position : self.position + count]
            parts.append(part)
            count -= len(part)
            self.position += len(part)
            if self.position == len(self._order):
                self.epoch += 1
                self.position = 0
                self._order = self._permutation(self.epoch)
        return np.concatenate(parts)

    def state_dict(self) -> dict[str, Any]:
        """JSON-serializable position, with the arguments that it belongs to."""
        return {**self._identity, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position. Raises CheckpointError when it belongs to other data, another seed or another order."""
        for name, here in self._identity.items():
            if state.get(name) != here:
                raise CheckpointError(
                    f"the checkpoint's data cursor has {name} = {state.get(name)} and this run has {here}; "
                    "resume with the checkpoint's data, seed and order"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = self._permutation(self.epoch)

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        num_prompts = int(self._identity["num_prompts"])
        if not self._identity["shuffle"]:
            return np.arange(num_prompts, dtype=np.int64)
        return np.random.default_rng([int(self._identity["seed"]), epoch]).permutation(num_prompts)
