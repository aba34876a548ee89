"""The database: engine, sessions, tables and migrations."""
