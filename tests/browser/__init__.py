"""A package, so that what its fixtures start ends with its last test and not with the whole session."""
