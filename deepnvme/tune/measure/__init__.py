"""Measures transfers of a tensor to and from folders: in this process, in several, and by fio."""
