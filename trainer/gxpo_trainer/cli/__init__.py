"""The `gxpo` command: `main` gathers the commands; one module each, which imports what it needs when it runs."""
