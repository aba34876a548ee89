"""The files of a run: writing, reading and uploading them, and their figures and tables."""
