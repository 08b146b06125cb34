"""Files and directories: replaced atomically, locked, preallocated, and read without trusting them."""
