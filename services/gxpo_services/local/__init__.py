"""The service on one machine: child processes, their supervision, and the demo."""
