"""Runs' folders on disk: safe access and removal."""

from __future__ import annotations
