"""Measuring transfers of a tensor to and from folders."""
