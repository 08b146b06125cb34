// What help() shows. Made by packaging/help_texts.py from the docstrings of the stubs: change those.
#pragma once

namespace deepnvme::bindings::help {

inline constexpr const char* Future = R"help(A read, write or fsync that an engine has started, or all transfers of one call such as `read_many`.)help";
inline constexpr const char* Future_nbytes = R"help(Bytes that the transfer was asked for; result() says how many were moved.)help";
inline constexpr const char* Future_done = R"help(Return whether the transfer has ended, with or without an error. Never blocks.

Raises:
    RuntimeError: In a forked child, where the result would never become True.)help";
inline constexpr const char* Future_result = R"help(Wait until the transfer has ended, and return the number of bytes transferred.

Args:
    timeout: Seconds to wait; None waits for as long as it takes. Ctrl-C interrupts the waiting, not the transfer.

Raises:
    OSError: The error of the transfer (of a fitting subclass where there is one), with errno and filename set.
    TimeoutError: After `timeout`. The transfer continues.)help";
inline constexpr const char* Future_exception = R"help(Wait like result(), and return the transfer's error, or None.)help";
inline constexpr const char* Future_cancel = R"help(Cancel the transfer, which then ends with OSError (ECANCELED) as soon as possible. Never blocks.

Best effort: I/O that has not begun is never started, but a drive or file system usually finishes I/O that has begun,
and if it hangs, the transfer stays in progress. The tensor must still not be touched until done() is True.
Afterwards the tensor or the file may have any part of the bytes, perhaps all. A CUDA transfer that waits for its
stream ends when the stream reaches it.

Returns:
    False if the transfer had ended already.

Raises:
    RuntimeError: In a forked child.)help";
inline constexpr const char* File = R"help(A file opened once for many transfers by Engine.open(). Usable with any engine, and as a context manager.)help";
inline constexpr const char* File_path = R"help(The path as it was given to Engine.open().)help";
inline constexpr const char* File_closed = R"help(Whether no more transfers are accepted, because close() was called.)help";
inline constexpr const char* File_direct = R"help(Whether transfers bypass the page cache. Becomes False if the file system refuses the first direct transfer.)help";
inline constexpr const char* File_alignment = R"help(Bytes. Transfers whose memory and file offset are multiples of this need no copy. 1 if the file has no direct I/O.)help";
inline constexpr const char* File_sector_size = R"help(Bytes. Direct transfers begin and end at multiples of this, in the file and in memory. 1 without direct I/O.)help";
inline constexpr const char* File_size = R"help(Return the file's present size in bytes.)help";
inline constexpr const char* File_close = R"help(Close the file: refuse further transfers. Idempotent.

Does not wait for transfers in progress: the descriptors are closed when the last transfer has ended. Leaving a
`with` block closes the file too, but raises nothing if another exception is leaving the block.

Raises:
    OSError: Naming the file, if the system reports a failed write only when the file is closed, as network file systems
        do. If transfers are still in progress, the future of the last one to end raises this error instead; if that one
        is a read, no future does. If the file is dropped without closing it, the error is lost.)help";
inline constexpr const char* backends = R"help(Try each backend. Return, by name, fastest first, None if it works on this machine, else the reason why it does not.)help";
inline constexpr const char* fail_at_exit = R"help(Have the process exit with status 1 if its exit status would be 0. No effect on `os._exit` and signals.)help";
inline constexpr const char* PinnedBuffer = R"help(Page-locked, huge-page-backed memory with the buffer protocol; freed with its last view.)help";
inline constexpr const char* PinnedBuffer_nbytes = R"help(Return the size of the memory in bytes.)help";
inline constexpr const char* PinnedBuffer_locked = R"help(Whether the system has locked the memory into RAM (mlock).)help";
inline constexpr const char* Engine = R"help(The native engine behind deepnvme.Engine, which documents it.)help";
inline constexpr const char* aio_handle = R"help(Reads tensors from files and writes tensors to files, on CPU or CUDA: DeepSpeed's handle, with the same methods.

>>> handle = aio_handle(block_size=1 << 20, queue_depth=32)
>>> handle.async_pwrite(tensor, "/mnt/nvme/tensor.bin")  # returns at once
0
>>> handle.wait()  # blocks until the tensor is written
1

The `sync_` methods, `read` and `write` block until the transfer has ended. The `async_` methods return at once, and
wait() waits for them. Offsets and sizes are in bytes; any value and any address works. Transfers whose memory, size and
file offset are multiples of 4096 bytes need no copy; new_cpu_locked_tensor() returns such memory.

Blocking methods release the GIL. A handle may be used by several threads. In a forked child every transfer raises
RuntimeError. Dropping the handle waits for its transfers.

Args:
    block_size: Most bytes of one system-level transfer, 512 to 1 GiB. Larger tensors are split.
    queue_depth: Most blocks in progress at a time for each worker, 1 to 4096.
    single_submit: Make one system call for each block rather than one for many.
    overlap_events: Has no effect: the engine always overlaps submission and completion.
    intra_op_parallelism: Number of workers (threads, each with its own queue), 1 to 256. One saturates most drives.
    num_threads: Another name for `intra_op_parallelism`.
    backend: "io_uring", "libaio" or "threads"; "auto" is the first of these that the kernel accepts.

Raises:
    TypeError: For an argument of the wrong type, from every method.
    ValueError: For a setting out of range; reads also raise it for a tensor that is not contiguous, or a range past the
        end of the file.
    OSError: If the kernel refuses the backend; from transfers, with errno and filename. After an error the handle stays
        usable.)help";
inline constexpr const char* aio_handle_read = R"help(Read `buffer.nbytes` bytes of the file, from byte `file_offset` on, into the tensor. Blocks. Returns 0.

With `validate`, compares the tensor with the file afterwards.

Raises:
    ValueError: If the tensor is not contiguous, or the range ends past the end of the file.
    OSError: If the file cannot be opened or read; EIO, with the first byte that differs, from `validate`.)help";
inline constexpr const char* aio_handle_write = R"help(Write the tensor's bytes to the file, from byte `file_offset` on. Blocks. Returns 0.

The file is created if it is missing, and never truncated. The drive has the bytes, but a power cut can still lose them:
call `os.fsync` if that matters. With `validate`, compares the tensor with the file afterwards.

Raises:
    OSError: If the file cannot be opened or written; ENOSPC before a byte is written if the disk has too little space;
        EIO, with the first byte that differs, from `validate`.)help";
inline constexpr const char* aio_handle_pread = R"help(Without `async`, read like read(), and return 1. With it, start reading, and return 0; wait() waits.

`async` is a keyword of Python: pass it by position.)help";
inline constexpr const char* aio_handle_pwrite = R"help(Without `async`, write like write(), and return 1. With it, start writing, and return 0; wait() waits.

`async` is a keyword of Python: pass it by position.)help";
inline constexpr const char* aio_handle_sync_pread = R"help(Read `buffer.nbytes` bytes of the file into the tensor. Blocks. Returns 1: one operation has ended.

`file_offset`: bytes from the start of the file. Raises like read().)help";
inline constexpr const char* aio_handle_sync_pwrite = R"help(Write the tensor's bytes to the file. Blocks. Returns 1: one operation has ended.

`file_offset`: bytes from the start of the file. The file is created, and errors are raised, as by write().)help";
inline constexpr const char* aio_handle_async_pread = R"help(Start reading `buffer.nbytes` bytes of the file into the tensor. Returns 0 at once; wait() waits.

The tensor must not be touched before wait() has returned. Until then the handle keeps the tensor's storage, which
must not be resized. A CUDA tensor is written to after the work queued on the device's current stream.

Args:
    buffer: Contiguous tensor of any dtype, on the CPU or a CUDA device.
    filename: Path of the file.
    file_offset: Bytes from the start of the file.

Raises:
    ValueError: If the tensor is not contiguous, or the range ends past the end of the file.
    OSError: If the file cannot be opened. Errors of the transfer are raised by wait().)help";
inline constexpr const char* aio_handle_async_pwrite = R"help(Start writing the tensor's bytes to the file. Returns 0 at once; wait() waits.

The tensor must not be changed before wait() has returned. Until then the handle keeps the tensor's storage, which
must not be resized.

Args:
    buffer: Tensor of any dtype, on the CPU or a CUDA device. A tensor that is not contiguous is copied first.
    filename: Path of the file, which is created if it is missing, and never truncated; or the descriptor (int) of a file
        that is open for writing.
    file_offset: Bytes from the start of the file.

Raises:
    OSError: If the file cannot be opened, or the disk has too little space (ENOSPC). Errors of the transfer are raised by
        wait().)help";
inline constexpr const char* aio_handle_async_pread_many = R"help(Start reading into several tensors, each from its own file, by one call. DeepSpeed has no such method.

Otherwise like async_pread(). `file_offsets`: bytes from the start of each file; None reads all from the start.
If the call raises, none of its reads is in progress, or counted by wait().)help";
inline constexpr const char* aio_handle_async_pwrite_many = R"help(Start writing several tensors, each to its own file, by one call: see async_pread_many().)help";
inline constexpr const char* aio_handle_wait = R"help(Block until all operations in progress have ended. Returns how many operations were started since the last wait.

Returns 0 if there was none. Ctrl-C interrupts the wait, not the operations: call it again.

Raises:
    OSError: The first error of any operation, with errno and filename, after all have ended. The next wait counts from
        zero.)help";
inline constexpr const char* aio_handle_get_block_size = R"help(Return the most bytes of one system-level transfer.)help";
inline constexpr const char* aio_handle_get_queue_depth = R"help(Return the most blocks that each worker has in progress at a time.)help";
inline constexpr const char* aio_handle_get_single_submit = R"help(Return whether each block is submitted by a separate system call.)help";
inline constexpr const char* aio_handle_get_overlap_events = R"help(Return `overlap_events` as it was given. The engine always overlaps.)help";
inline constexpr const char* aio_handle_get_intra_op_parallelism = R"help(Return the number of workers, each with its own queue.)help";
inline constexpr const char* aio_handle_get_thread_count = R"help(Return the number of workers, like get_intra_op_parallelism().)help";
inline constexpr const char* aio_handle_get_alignment = R"help(Return 512 bytes times the number of workers. DeepSpeed pads its buffers to a multiple of this.)help";
inline constexpr const char* aio_handle_new_cpu_locked_tensor = R"help(Return a flat tensor of `num_elem` zeros in page-locked memory, with the dtype of `example_tensor`.

Transfers of such a tensor need no copy. Raises MemoryError if the system has too little memory.)help";
inline constexpr const char* aio_handle_free_cpu_locked_tensor = R"help(Forget that a tensor of new_cpu_locked_tensor() is pinned. Returns whether it was known to be.

The memory is freed with its last view.)help";
inline constexpr const char* aio_handle_is_pinned = R"help(Return whether the tensor lies in memory that any handle or engine of this package has pinned.)help";
inline constexpr const char* aio_handle_stats = R"help(Return counters of the handle's transfers, by the names of deepnvme.Stats. Never blocks.)help";
inline constexpr const char* empty_pinned = R"help(Allocate page-locked memory of `nbytes` bytes, zeroed, on a NUMA node if one is given.

Raises MemoryError, or ValueError if the machine has no such node.)help";
inline constexpr const char* is_pinned = R"help(Return whether the tensor lies in memory that this package has pinned.)help";
inline constexpr const char* aio_read = R"help(Read the start of a file into a tensor, with a handle made for this call alone. Blocks. Returns 0.

Arguments are those of aio_handle and its `read`.)help";
inline constexpr const char* aio_write = R"help(Write a tensor to the start of a file, with a handle made for this call alone. Blocks. Returns 0.

Arguments are those of aio_handle and its `write`.)help";
inline constexpr const char* deepspeed_memcpy = R"help(Copy the bytes of `src` into `dest`. Returns 0. Raises ValueError if their sizes in bytes differ.)help";
inline constexpr const char* gds_handle = R"help(Transfers between files and CUDA tensors by GPUDirect Storage: DeepSpeed's handle, with the methods of `aio_handle`.

cuFile transfers whole pages of a CUDA tensor between the drive and GPU memory, a block at a time on up to 16 threads for each
worker. Incomplete pages at the ends, and CPU tensors, are transferred as with `aio_handle`. So are all bytes if cuFile, its
driver, or the file's filesystem or drive does not support GPU-direct transfers; `stats()["fallbacks"]` has the reason.
`stats()["bytes_gds"]` is the number of bytes that cuFile has transferred.

Args:
    block_size: Most bytes of one transfer, 512 to 1 GiB. Larger tensors are split.
    queue_depth: Most blocks in progress at a time for each worker, 1 to 4096.
    single_submit: As for `aio_handle`.
    overlap_events: Has no effect.
    intra_op_parallelism: Number of workers, 1 to 256.
    num_threads: Another name for `intra_op_parallelism`.
    strict: Raise rather than fall back: RuntimeError from the constructor if there is no cuFile, and OSError from a transfer
        of a file that cuFile does not support.)help";
inline constexpr const char* gds_handle_new_pinned_device_tensor = R"help(Return a new tensor with the device and dtype of `example_tensor`, registered as by pin_device_tensor().)help";
inline constexpr const char* gds_handle_free_pinned_device_tensor = R"help(Unregister a tensor's memory: another name of unpin_device_tensor().)help";
inline constexpr const char* gds_handle_pin_device_tensor = R"help(Register a tensor's memory with cuFile, which then needs no bounce buffer for it. Return whether it was registered.

The tensor's storage is kept, and must not be resized, until it is unregistered. Returns False if cuFile is not used, or
the tensor has less than 4096 bytes. Raises ValueError for a tensor on the CPU or one that is not contiguous, OSError if
cuFile refuses the memory (EEXIST for memory registered already).)help";
inline constexpr const char* gds_handle_unpin_device_tensor = R"help(Unregister a tensor's memory. Return False if it is not registered. Not allowed while it is being transferred.

Raises OSError if the device's context is not available; the tensor then stays registered.)help";
inline constexpr const char* adopt_pinned_ranges = R"help(Share the record of pinned memory of `async_io` with this op. Called by `GDSBuilder.load`.)help";
inline constexpr const char* version = R"help(Return the version of cuFile, such as "1.14". Raises RuntimeError if there is no cuFile.)help";

}  // namespace deepnvme::bindings::help
