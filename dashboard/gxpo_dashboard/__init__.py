"""The browser view: a client of the REST service and nothing else."""
