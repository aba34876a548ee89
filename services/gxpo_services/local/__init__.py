"""The service on one machine: processes, supervision and demo."""
