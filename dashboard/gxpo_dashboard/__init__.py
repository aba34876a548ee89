"""The dashboard: a pure client of the REST API."""
