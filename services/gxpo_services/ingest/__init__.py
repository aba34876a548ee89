"""What trainers report: parsing, and application once each."""
