"""Comparison of runs at equal cost, heat map and export."""
