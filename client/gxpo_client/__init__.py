"""Shared by the command line and the dashboard: the HTTP client of the REST API, and formats of numbers and times."""
