"""Keys of the writers' statistics, named as DeepSpeed 0.19 names them in ``io/constants.py``."""

from __future__ import annotations

INVALID_FD = -1
"""What ``fileno`` returns, so that torch writes through the writer and not to a file descriptor."""

FILE_PATH_KEY = "path"
FLUSH_COUNT_KEY = "flush"
WRITE_COUNT_KEY = "write"
CLOSE_COUNT_KEY = "close"
FILENO_COUNT_KEY = "fileno"
WRITE_BYTES_KEY = "bytes"
WRITE_SEC_KEY = "write_secs"
WRITE_SPEED_KEY = "write_GB/s"
"""In GiB/s despite its name, as are all speeds here."""

AIO_WRITE_SEC_KEY = "aio_write_secs"
AIO_WRITE_BYTES_KEY = "aio_bytes"
AIO_SPEED_KEY = "aio_GB/s"
SLOW_WRITE_BYTES_KEY = "slow_bytes"
SLOW_WRITE_SEC_KEY = "slow_write_secs"
AIO_FILL_BUFFER_SEC_KEY = "fill_buffer_secs"
AIO_FILL_BUFFER_COUNT_KEY = "fill_buffer_count"
AIO_FILL_BUFFER_SPEED_KEY = "fill_buffer_GB/s"

SAVE_STORAGE_KEY = "save_storage"
SAVE_STORAGE_BYTES_KEY = "save_storage_bytes"
SAVE_STORAGE_SEC_KEY = "save_storage_secs"
STORAGE_OBJ_SIZE = 8
"""Bytes that a storage's number of elements takes in torch's older file format."""

RANK_KEY = "rank"
