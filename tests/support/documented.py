"""Metric names that docs/metrics.md explains."""

from docs_build.metrics import undescribed as undocumented

__all__ = ["undocumented"]
