"""Responses of the service as series, rows and form settings. Pure."""
