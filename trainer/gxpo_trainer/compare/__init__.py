"""Comparison of runs: convergence, equal budgets, seeds, confidence intervals and evidence.

Pure functions on numpy arrays, shared by `gxpo report` and the job service. `rows` converts a run's rows to curves,
`curves` evaluates one curve, `seeds` groups runs and lists unequal conditions, `intervals` has the statistics,
`groups` compares groups, `evidence` states the result in words and `text_tables` in tables.
"""
