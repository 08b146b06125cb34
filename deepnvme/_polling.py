"""Intervals of waits that nobody wakes: seconds between two looks whether something has changed."""

TRANSFER_POLL_SECONDS = 0.0005
"""While a transfer ends, or somebody lets go of its memory: well below the 5 ms that the smallest useful block takes."""
PROCESS_POLL_SECONDS = 0.02
"""While another process does something: writes its name into a lock file, or builds a store."""
