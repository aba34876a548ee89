"""Records to chart specs. Pure."""
