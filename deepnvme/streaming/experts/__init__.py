"""Experts of a mixture, read from the checkpoint's files when the router has chosen them."""
