"""Authentication and authorization: roles, secrets and principals."""

from __future__ import annotations
