"""Groups of runs and sweeps."""
