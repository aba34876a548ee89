"""Comparing runs: convergence, equal budgets, seeds, intervals and what follows from them.

Pure functions on numpy arrays, shared by the report of a run and the job service. `rows` makes curves of what a run
wrote, `curves` reads one of them, `seeds` finds the runs that belong together, `intervals` is the statistics,
`groups` compares, `differences` says what was not equal, `evidence` puts it in words and `text_tables` in tables.
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
from gxpo_trainer.compare.differences import Difference, differing_settings, find_differences
from gxpo_trainer.compare.evidence import MIN_SEEDS, Evidence, evidence_sentence, format_hours, weigh
from gxpo_trainer.compare.groups import (
    BudgetResult,
    Comparison,
    GroupResult,
    SeedResult,
    common_budgets,
    compare_groups,
    default_baseline,
    spread_budgets,
)
from gxpo_trainer.compare.heat_map import HeatCell, HeatMap, heat_map, varied_settings
from gxpo_trainer.compare.intervals import (
    Interval,
    mean_interval,
    paired_bootstrap,
    ratio_interval,
    t_critical,
)
from gxpo_trainer.compare.rows import (
    FREE,
    SERIES_NAMES,
    Series,
    benchmark_names,
    decode_evaluation,
    flatten,
    is_under,
    rule_label,
    run_curves,
)
from gxpo_trainer.compare.seeds import SeedGroup, config_key, group_by_config, group_labels, seed_band
from gxpo_trainer.compare.text_tables import Table, all_tables, equal_cost_table, percent

__all__ = [
    "AXES",
    "FREE",
    "MIN_SEEDS",
    "SERIES_NAMES",
    "Axis",
    "BudgetPoint",
    "BudgetResult",
    "Comparison",
    "Difference",
    "EvaluationCurve",
    "Evidence",
    "GateTrace",
    "GroupResult",
    "HeatCell",
    "HeatMap",
    "Interval",
    "Point",
    "RunCurves",
    "SeedGroup",
    "SeedResult",
    "Series",
    "Table",
    "all_tables",
    "at_budget",
    "benchmark_names",
    "common_budgets",
    "compare_groups",
    "config_key",
    "decode_evaluation",
    "default_baseline",
    "differing_settings",
    "equal_cost_table",
    "evidence_sentence",
    "find_differences",
    "first_reaching",
    "flatten",
    "format_hours",
    "group_by_config",
    "group_labels",
    "heat_map",
    "is_under",
    "mean_curve",
    "mean_interval",
    "paired_bootstrap",
    "peak",
    "percent",
    "ratio_interval",
    "rule_label",
    "run_curves",
    "seed_band",
    "smooth",
    "speed_up",
    "spread_budgets",
    "t_critical",
    "varied_settings",
    "weigh",
]
