"""Comparing runs: convergence, equal budgets, seeds, intervals and what follows from them.

Pure functions on numpy arrays, shared by the report of a run and the job service. `curves` reads one run,
`intervals` is the statistics, `groups` compares seeds of several configurations, `evidence` says it in words.
"""

from gxpo_trainer.compare.curves import (
    AXES,
    Axis,
    BudgetPoint,
    EvaluationCurve,
    GateTrace,
    Point,
    RunCurves,
    at_budget,
    first_reaching,
    mean_curve,
    peak,
    smooth,
    speed_up,
)
from gxpo_trainer.compare.evidence import MIN_SEEDS, Evidence, evidence_sentence, format_hours, weigh
from gxpo_trainer.compare.groups import (
    BudgetResult,
    Comparison,
    Difference,
    GroupResult,
    SeedGroup,
    common_budgets,
    compare_groups,
    find_differences,
)
from gxpo_trainer.compare.intervals import (
    Interval,
    mean_interval,
    paired_bootstrap,
    ratio_interval,
    t_critical,
)

__all__ = [
    "AXES",
    "MIN_SEEDS",
    "Axis",
    "BudgetPoint",
    "BudgetResult",
    "Comparison",
    "Difference",
    "EvaluationCurve",
    "Evidence",
    "GateTrace",
    "GroupResult",
    "Interval",
    "Point",
    "RunCurves",
    "SeedGroup",
    "at_budget",
    "common_budgets",
    "compare_groups",
    "evidence_sentence",
    "find_differences",
    "first_reaching",
    "format_hours",
    "mean_curve",
    "mean_interval",
    "paired_bootstrap",
    "peak",
    "ratio_interval",
    "smooth",
    "speed_up",
    "t_critical",
    "weigh",
]
