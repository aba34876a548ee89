"""A component of each kind, as a user packages them; installed by the fixture `workbench`."""
