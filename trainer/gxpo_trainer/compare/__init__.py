"""Comparison of runs: convergence, equal budgets, seeds, confidence intervals and evidence.

Pure functions on numpy arrays, shared by `gxpo report` and the job service. `rows` converts a run's rows to curves,
`curves` evaluates one curve, `seeds` groups runs, `intervals` has the statistics, `groups` compares groups,
`differences` lists unequal conditions, `evidence` states the result in words and `text_tables` in tables.
"""
