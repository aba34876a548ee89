"""Metric names that docs/metrics.md explains."""

from gxpo_trainer.reporting.metric_table import undescribed as undocumented

__all__ = ["undocumented"]
