"""Moves blocks between memory and a drive: a cache of blocks, and many small pieces in few large transfers."""
