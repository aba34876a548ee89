"""Groups of runs and sweeps."""

from __future__ import annotations
