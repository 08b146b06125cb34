"""Many small pieces in few large transfers: gathered into chunks for writing, scattered from chunks after reading."""
