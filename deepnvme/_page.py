"""The unit that direct I/O goes by, whatever the size of the processor's pages."""

PAGE = 4096
"""Bytes: no drive asks more of offsets, lengths and addresses."""
