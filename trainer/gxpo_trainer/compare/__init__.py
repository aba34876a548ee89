"""Comparison of runs: convergence, equal budgets, seeds, confidence intervals and evidence.

Pure functions on numpy arrays, shared by `gxpo report` and the job service. `rows` converts a run's rows to curves,
`curves` evaluates one curve, `seeds` groups runs, `intervals` has the statistics, `groups` compares groups,
`differences` lists unequal conditions, `evidence` states the result in words and `text_tables` in tables.
"""

from gxpo_trainer.compare.curves import (
    AXES,
    Axis,
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
from gxpo_trainer.compare.evidence import Evidence, evidence_sentence, weigh
from gxpo_trainer.compare.groups import (
    Comparison,
    GroupResult,
    SeedResult,
    compare_groups,
    default_baseline,
    spread_budgets,
)
from gxpo_trainer.compare.heat_map import heat_map, varied_settings
from gxpo_trainer.compare.intervals import (
    Interval,
    mean_interval,
    paired_bootstrap,
    ratio_interval,
    shared_bootstrap,
    t_critical,
)
from gxpo_trainer.compare.rows import (
    GATE_Z,
    LAST_ONLY,
    SERIES_NAMES,
    Series,
    benchmark_names,
    decode_evaluation,
    flatten,
    rule_label,
    run_curves,
    series_needed,
)
from gxpo_trainer.compare.seeds import SeedGroup, config_key, group_by_config, group_labels, seed_band
from gxpo_trainer.compare.text_tables import Table, all_tables, equal_cost_table, percent

__all__ = [
    "AXES",
    "GATE_Z",
    "LAST_ONLY",
    "SERIES_NAMES",
    "Axis",
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
    "SeedResult",
    "Series",
    "Table",
    "all_tables",
    "at_budget",
    "benchmark_names",
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
    "group_by_config",
    "group_labels",
    "heat_map",
    "mean_curve",
    "mean_interval",
    "paired_bootstrap",
    "peak",
    "percent",
    "ratio_interval",
    "rule_label",
    "run_curves",
    "seed_band",
    "series_needed",
    "shared_bootstrap",
    "smooth",
    "speed_up",
    "spread_budgets",
    "t_critical",
    "varied_settings",
    "weigh",
]
