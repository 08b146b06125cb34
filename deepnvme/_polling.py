"""Poll intervals: seconds between two checks in a wait that no event ends."""

TRANSFER_POLL_SECONDS = 0.0005
"""Poll interval while waiting for a transfer or for memory: well below the 5 ms that the smallest useful block takes."""
PROCESS_POLL_SECONDS = 0.02
"""Poll interval while waiting for another process, which writes its name into a lock file, or builds a store."""
