"""One cache of blocks on a drive whose next uses are known."""
