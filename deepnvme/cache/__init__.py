"""An in-memory cache of blocks that are stored on a drive, for callers that know which blocks they use next."""
