"""Keys and values of long generation outside of the compute device."""
