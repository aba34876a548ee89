"""Metric series: storage, reading and downsampling."""
