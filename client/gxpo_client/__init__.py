"""The HTTP client of the REST API, shared by the command line and the dashboard."""
