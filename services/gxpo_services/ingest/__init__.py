"""Reports of trainers: parsing, and exactly-once application."""
