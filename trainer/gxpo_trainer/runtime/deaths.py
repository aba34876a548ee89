"""What Ray raises for a call to an actor whose process or node is lost."""

from __future__ import annotations

import ray

ACTOR_LOST = ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.OutOfMemoryError
"""The last is for an actor that Ray's memory monitor killed; it is no RayActorError."""
