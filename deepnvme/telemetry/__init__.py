"""What is told to people: progress, reports, sizes as text, bytes written to a drive, ranges in profiles."""
