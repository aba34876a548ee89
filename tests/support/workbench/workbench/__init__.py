"""A component of each kind, as a package registers them; installed by the fixture `workbench`."""
