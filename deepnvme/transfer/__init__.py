"""Moves blocks of memory to and from a drive: many small pieces in few large transfers."""
