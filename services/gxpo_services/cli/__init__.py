"""Commands that talk to a service over HTTP."""
