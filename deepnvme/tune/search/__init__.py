"""Searches for the best settings of a drive."""
