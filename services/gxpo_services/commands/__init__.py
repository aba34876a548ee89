"""The service's commands: arguments in register.py, work in modules that are imported only when a command runs."""
