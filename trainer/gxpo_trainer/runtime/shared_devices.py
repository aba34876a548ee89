"""Whose memory is on the GPUs that learner and engines share.

| phase | engines | learner |
|---|---|---|
| sampling | awake | parked on the host |
| updating | asleep | on the GPU |
| syncing | weights awake, no KV cache | on the GPU, without what only a pass needs |

Callers state the phase that they need; what leaves the GPU goes first, so the sum of both always fits.

An engine measures the free memory of its GPU when it starts and sizes its KV cache by it, so engines start in the
phase `sampling` only, while the learner's memory does not change. That also holds where nothing moves.
"""

from __future__ import annotations

from typing import Literal, Protocol

Phase = Literal["sampling", "updating", "syncing"]


class SharingEngines(Protocol):
    """The part of `rollout.engines.Engines` that shared GPUs need."""

    def hold_starts(self) -> None: ...

    def allow_starts(self) -> None: ...

    def sleep(self, *, discard_weights: bool) -> None: ...

    def wake(self, what: Literal["weights", "kv_cache"]) -> None: ...


class SharingLearner(Protocol):
    """The part of `learner.group.LearnerGroup` that shared GPUs need."""

    def park(self) -> None: ...

    def unpark(self) -> None: ...

    def trim(self) -> None: ...


class Devices:
    """What learner and engines call; here each has devices of its own, so nothing moves."""

    alternate = False
    """Whether engines and learner leave the GPUs to each other, so that no engine may sample during a sync."""

    def need(self, phase: Phase, *, sync_follows: bool = False) -> None:
        """Bring about `phase`. sync_follows: the engines' weights need not survive, because they are synced next."""

    def learner_starts(self) -> None:
        """The learner is about to start, or to start again: no engine may be starting any more."""
        self.need("updating")

    def engines_start(self) -> None:
        """All engines were lost while the learner had the GPUs: it leaves, and they start."""
        self.need("sampling")


class ResidentDevices(Devices):
    """Shared GPUs that hold learner and engines at once: nothing moves, but engines start while the learner is idle."""

    def __init__(self, engines: SharingEngines) -> None:
        self._engines = engines

    def need(self, phase: Phase, *, sync_follows: bool = False) -> None:
        if phase == "sampling":
            self._engines.allow_starts()
        else:
            self._engines.hold_starts()


class SharedDevices(Devices):
    """Switches between the phases. Begins in `sampling`: the engines are built first, then the learner.

    adapters: the engines' base weights never come again, so they are kept on the host while the engines sleep.
    """

    alternate = True

    def __init__(self, engines: SharingEngines, learner: SharingLearner, *, adapters: bool) -> None:
        self._engines, self._learner, self._adapters = engines, learner, adapters
        self.phase: Phase = "sampling"
        self._weights_lost = False

    def need(self, phase: Phase, *, sync_follows: bool = False) -> None:
        """See Devices.need. Raises RuntimeError for `sampling` when the weights were given up and no sync followed."""
        if phase == self.phase:
            return
        if phase == "sampling":
            if self._weights_lost:
                raise RuntimeError("engine weights were released; sync before sampling")
            self._learner.park()
            if self.phase == "updating":
                self._engines.wake("weights")
            self._engines.wake("kv_cache")
        elif phase == "updating":
            discard = sync_follows and not self._adapters
            self._engines.sleep(discard_weights=discard)
            self._weights_lost = discard
            if self.phase == "sampling":
                self._learner.unpark()
        else:
            if self.phase == "sampling":
                self._engines.sleep(discard_weights=not self._adapters)
                self._learner.unpark()
            # Activations and logits of the last pass stay reserved by torch until it is told to release them.
            self._learner.trim()
            self._engines.wake("weights")
            self._weights_lost = False
        self.phase = phase

    def learner_starts(self) -> None:
        if self.phase != "updating":
            # Not discarded: recovery may end with an evaluation at the version that the engines hold.
            self._engines.sleep(discard_weights=False)
        self.phase = "updating"

    def engines_start(self) -> None:
        """See Devices.engines_start. Lost engines start with the KV cache, and load the weights of their folder."""
        self._learner.park()
        self._engines.wake("kv_cache")
        self.phase, self._weights_lost = "sampling", False
