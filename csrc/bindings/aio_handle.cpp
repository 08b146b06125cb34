#include "bindings/aio_handle.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>
#include <vector>

#include "bindings/bind_functions.h"
#include "bindings/help_texts.h"
#include "bindings/pinned_buffer.h"

namespace deepnvme::bindings {

namespace {

using namespace nanobind::literals;

// DeepSpeed pads to this many bytes per worker; its callers compute sizes from it.
constexpr std::int64_t kDeepSpeedAlignment = 512;

// Reads the range back through the page cache and compares. Throws IoError(EIO) naming the first byte that differs.
void compare_with_file(const std::byte* memory, std::uint64_t length, std::uint64_t offset, const std::string& path) {
    constexpr std::size_t kChunk = std::size_t{1} << 20;
    File file(path, Access::read, Creation::must_exist, false);
    std::vector<std::byte> chunk(std::min<std::uint64_t>(kChunk, length));
    for (std::uint64_t done = 0; done < length;) {
        const auto want = static_cast<std::size_t>(std::min<std::uint64_t>(chunk.size(), length - done));
        const ssize_t got = ::pread(file.buffered(), chunk.data(), want, static_cast<off_t>(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) throw IoError(errno, "validation", path);
        const auto size = static_cast<std::size_t>(got);
        const auto differs = std::mismatch(chunk.begin(), chunk.begin() + got, memory + done).first - chunk.begin();
        if (size == 0 || static_cast<std::size_t>(differs) < size)
            throw IoError(EIO, "validation: tensor and file differ at byte " + std::to_string(offset + done + static_cast<std::size_t>(differs)), path);
        done += size;
    }
}

void check_result(const Pending& pending) {
    pending.check();
    if (!pending.validate) return;
    const Request& request = *pending.request;
    if (!request.device) {
        nb::gil_scoped_release release;
        return compare_with_file(request.memory, request.length, request.offset, pending.path);
    }
    constexpr std::uint64_t kPart = 16 << 20;  // the host need not have room for what the device has
    const nb::object& bytes = pending.owner;
    for (std::uint64_t at = 0; at < request.length; at += kPart) {
        const std::uint64_t length = std::min(kPart, request.length - at);
        const nb::object on_host = bytes.attr("narrow")(0, at, length).attr("cpu")();
        const std::byte* memory = memory_of(on_host, Direction::write).data;
        nb::gil_scoped_release release;
        compare_with_file(memory, length, request.offset + at, pending.path);
    }
}

std::int64_t worker_count(std::int64_t intra_op_parallelism, const nb::object& num_threads) {
    if (num_threads.is_none()) return intra_op_parallelism;
    const std::int64_t count = integer_of(num_threads, "num_threads");
    if (intra_op_parallelism != 1 && count != intra_op_parallelism)
        throw value_error("num_threads is another name for intra_op_parallelism, got " + std::to_string(count) + " and " +
                              std::to_string(intra_op_parallelism));
    return count;
}

EngineOptions checked_options(std::int64_t block_size, std::int64_t queue_depth, bool single_submit,
                              std::int64_t intra_op_parallelism, std::string backend) {
    if (intra_op_parallelism < 1)
        throw value_error("intra_op_parallelism must be in [1, 256], got " + std::to_string(intra_op_parallelism));
    return {std::move(backend), block_size, queue_depth, intra_op_parallelism, single_submit};
}

nb::object new_cpu_locked_tensor(std::int64_t num_elem, nb::handle example) {
    require_tensor(example);
    if (num_elem < 0) throw value_error("num_elem must not be negative, got " + std::to_string(num_elem));
    const auto torch = nb::module_::import_("torch");
    if (num_elem == 0) return torch.attr("empty")(0, "dtype"_a = example.attr("dtype"));
    std::int64_t nbytes;
    if (__builtin_mul_overflow(num_elem, nb::cast<std::int64_t>(example.attr("element_size")()), &nbytes))
        throw value_error("num_elem is too large: " + std::to_string(num_elem));
    // Through bytes, since frombuffer knows fewer dtypes than view does.
    const nb::object buffer = nb::cast(make_pinned_buffer(nbytes));
    return torch.attr("frombuffer")(buffer, "dtype"_a = torch.attr("uint8")).attr("view")(example.attr("dtype"));
}

bool free_cpu_locked_tensor(nb::handle tensor) {
    require_tensor(tensor);
    return pinned_ranges::remove(reinterpret_cast<const std::byte*>(nb::cast<std::uintptr_t>(tensor.attr("data_ptr")())));
}

int transfer_alone(Direction direction, nb::handle buffer, nb::handle filename, std::int64_t block_size, std::int64_t queue_depth,
                   bool single_submit, bool overlap_events, bool validate) {
    AioHandle handle(checked_options(block_size, queue_depth, single_submit, 1, "auto"), overlap_events);
    handle.finish(direction, buffer, filename, 0, validate);
    return 0;
}

int copy_bytes(nb::handle dest, nb::handle src) {
    const TensorMemory to = memory_of(dest, Direction::read);
    const TensorMemory from = memory_of(src, Direction::write);
    if (to.nbytes != from.nbytes)
        throw value_error("dest has " + std::to_string(to.nbytes) + " bytes and src " + std::to_string(from.nbytes));
    if (to.nbytes == 0) return 0;
    bytes_of(to.tensor).attr("copy_")(bytes_of(from.tensor));  // by torch, with all its threads
    return 0;
}

}  // namespace

AioHandle::AioHandle(EngineOptions options, bool overlap_events) : session_(options), overlap_events_(overlap_events) {}

AioHandle::AioHandle(std::unique_ptr<Engine> engine, bool overlap_events)
    : session_(std::move(engine)), overlap_events_(overlap_events) {}

EngineOptions handle_options(nb::handle block_size, nb::handle queue_depth, bool single_submit, nb::handle intra_op_parallelism,
                             const nb::object& num_threads, std::string backend) {
    const auto workers = worker_count(integer_of(intra_op_parallelism, "intra_op_parallelism"), num_threads);
    return checked_options(integer_of(block_size, "block_size"), integer_of(queue_depth, "queue_depth"), single_submit, workers,
                           std::move(backend));
}

int AioHandle::start(Direction direction, nb::handle buffer, nb::handle filename, std::int64_t offset, bool validate) {
    started_.push_back(session_.transfer(direction, buffer, filename, offset, validate));
    return 0;
}

int AioHandle::start_many(Direction direction, nb::handle buffers, nb::handle filenames, nb::handle offsets) {
    started_.push_back(session_.transfer_many(direction, buffers, filenames, offsets));
    return 0;
}

int AioHandle::start_descriptor(nb::handle buffer, int fd, std::int64_t offset) {
    started_.push_back(session_.write_descriptor(buffer, fd, offset));
    return 0;
}

int AioHandle::finish(Direction direction, nb::handle buffer, nb::handle filename, std::int64_t offset, bool validate) {
    const auto pending = session_.transfer(direction, buffer, filename, offset, validate);
    pending->wait_for(std::nullopt);
    check_result(*pending);
    return 1;
}

int AioHandle::wait() {
    session_.engine();  // not in a forked child
    // Off the list, since others may start more, or wait, meanwhile.
    auto ended = std::exchange(started_, {});
    try {
        // The newest first: by its end most others will have ended, and need no waiting of their own.
        for (auto pending = ended.rbegin(); pending != ended.rend(); ++pending) (*pending)->wait_for(std::nullopt);
    } catch (...) {
        // Interrupted: back on the list, so that the wait can be taken up again.
        started_.insert(started_.begin(), ended.begin(), ended.end());
        throw;
    }
    std::exception_ptr first;
    std::size_t transfers = 0;
    for (const auto& pending : ended) {
        transfers += pending->transfers();
        try {
            check_result(*pending);
        } catch (...) {  // IoError, or what torch says of a device
            if (!first) first = std::current_exception();
        }
        pending->release_memory();
    }
    if (first) std::rethrow_exception(first);
    return static_cast<int>(transfers);
}

nb::class_<AioHandle> define_handle(nb::module_& module, const char* name, const char* doc) {
    const auto options = [](AioHandle& self) -> const EngineOptions& { return self.session().engine().options(); };

    nb::class_<AioHandle> handle(module, name, nb::is_weak_referenceable(), doc);
    handle
        .def("get_block_size", [options](AioHandle& self) { return options(self).block_size; }, help::aio_handle_get_block_size)
        .def(
            "get_queue_depth", [options](AioHandle& self) { return options(self).queue_depth; },
            help::aio_handle_get_queue_depth)
        .def(
            "get_single_submit", [options](AioHandle& self) { return options(self).single_submit; },
            help::aio_handle_get_single_submit)
        .def(
            "get_overlap_events", [](const AioHandle& self) { return self.overlap_events(); },
            help::aio_handle_get_overlap_events)
        .def(
            "get_intra_op_parallelism", [options](AioHandle& self) { return options(self).num_threads; },
            help::aio_handle_get_intra_op_parallelism)
        .def(
            "get_thread_count", [options](AioHandle& self) { return options(self).num_threads; },
            help::aio_handle_get_thread_count)
        .def(
            "get_alignment", [options](AioHandle& self) { return options(self).num_threads * kDeepSpeedAlignment; },
            help::aio_handle_get_alignment)

        .def(
            "read",
            [](AioHandle& self, nb::handle buffer, nb::handle filename, Flag validate, nb::handle file_offset) {
                self.finish(Direction::read, buffer, filename, integer_of(file_offset, "file_offset"), validate);
                return 0;
            },
            "buffer"_any, "filename"_any, "validate"_a, "file_offset"_any = 0,
            nb::sig("def read(self, buffer: torch.Tensor, filename: str | bytes | os.PathLike, validate: bool, file_offset: "
                    "int = 0) -> int"),
            help::aio_handle_read)
        .def(
            "write",
            [](AioHandle& self, nb::handle buffer, nb::handle filename, Flag validate, nb::handle file_offset) {
                self.finish(Direction::write, buffer, filename, integer_of(file_offset, "file_offset"), validate);
                return 0;
            },
            "buffer"_any, "filename"_any, "validate"_a, "file_offset"_any = 0,
            nb::sig("def write(self, buffer: torch.Tensor, filename: str | bytes | os.PathLike, validate: bool, file_offset: "
                    "int = 0) -> int"),
            help::aio_handle_write)
        .def(
            "pread",
            [](AioHandle& self, nb::handle buffer, nb::handle filename, Flag validate, Flag async, nb::handle file_offset) {
                return async ? self.start(Direction::read, buffer, filename, integer_of(file_offset, "file_offset"), validate)
                             : self.finish(Direction::read, buffer, filename, integer_of(file_offset, "file_offset"), validate);
            },
            "buffer"_any, "filename"_any, "validate"_a, "async"_a, "file_offset"_any = 0,
            nb::sig("def pread(self, buffer: torch.Tensor, filename: str | bytes | os.PathLike, validate: bool, async: bool, "
                    "file_offset: int = 0) -> int"),
            help::aio_handle_pread)
        .def(
            "pwrite",
            [](AioHandle& self, nb::handle buffer, nb::handle filename, Flag validate, Flag async, nb::handle file_offset) {
                return async ? self.start(Direction::write, buffer, filename, integer_of(file_offset, "file_offset"), validate)
                             : self.finish(Direction::write, buffer, filename, integer_of(file_offset, "file_offset"), validate);
            },
            "buffer"_any, "filename"_any, "validate"_a, "async"_a, "file_offset"_any = 0,
            nb::sig("def pwrite(self, buffer: torch.Tensor, filename: str | bytes | os.PathLike, validate: bool, async: bool, "
                    "file_offset: int = 0) -> int"),
            help::aio_handle_pwrite)
        .def(
            "sync_pread",
            [](AioHandle& self, nb::handle buffer, nb::handle filename, nb::handle file_offset) {
                return self.finish(Direction::read, buffer, filename, integer_of(file_offset, "file_offset"), false);
            },
            "buffer"_any, "filename"_any, "file_offset"_any = 0,
            nb::sig("def sync_pread(self, buffer: torch.Tensor, filename: str | bytes | os.PathLike, file_offset: int = 0) -> "
                    "int"),
            help::aio_handle_sync_pread)
        .def(
            "sync_pwrite",
            [](AioHandle& self, nb::handle buffer, nb::handle filename, nb::handle file_offset) {
                return self.finish(Direction::write, buffer, filename, integer_of(file_offset, "file_offset"), false);
            },
            "buffer"_any, "filename"_any, "file_offset"_any = 0,
            nb::sig("def sync_pwrite(self, buffer: torch.Tensor, filename: str | bytes | os.PathLike, file_offset: int = 0) -> "
                    "int"),
            help::aio_handle_sync_pwrite)
        .def(
            "async_pread",
            [](AioHandle& self, nb::handle buffer, nb::handle filename, nb::handle file_offset) {
                return self.start(Direction::read, buffer, filename, integer_of(file_offset, "file_offset"), false);
            },
            "buffer"_any, "filename"_any, "file_offset"_any = 0,
            nb::sig("def async_pread(self, buffer: torch.Tensor, filename: str | bytes | os.PathLike, file_offset: int = 0) -> "
                    "int"),
            help::aio_handle_async_pread)
        .def(
            "async_pwrite",
            [](AioHandle& self, nb::handle buffer, const nb::int_& fd, nb::handle file_offset) {
                const long number = PyLong_AsLong(fd.ptr());
                if (PyErr_Occurred()) throw nb::python_error();
                if (number < 0 || number > std::numeric_limits<int>::max())
                    throw IoError(EBADF, "use of file descriptor " + std::to_string(number), "");
                return self.start_descriptor(buffer, static_cast<int>(number), integer_of(file_offset, "file_offset"));
            },
            "buffer"_any, "fd"_a, "file_offset"_any = 0,
            nb::sig("def async_pwrite(self, buffer: torch.Tensor, fd: int, file_offset: int = 0) -> int"),
            help::aio_handle_async_pwrite)
        .def(
            "async_pwrite",
            [](AioHandle& self, nb::handle buffer, nb::handle filename, nb::handle file_offset) {
                return self.start(Direction::write, buffer, filename, integer_of(file_offset, "file_offset"), false);
            },
            "buffer"_any, "filename"_any, "file_offset"_any = 0,
            nb::sig("def async_pwrite(self, buffer: torch.Tensor, filename: str | bytes | os.PathLike, file_offset: int = 0) "
                    "-> int"),
            help::aio_handle_async_pwrite)
        .def(
            "async_pread_many",
            [](AioHandle& self, nb::handle buffers, nb::handle filenames, nb::handle file_offsets) {
                return self.start_many(Direction::read, buffers, filenames, file_offsets);
            },
            "buffers"_any, "filenames"_any, "file_offsets"_a = nb::none(),
            nb::sig("def async_pread_many(self, buffers: Sequence[torch.Tensor], filenames: Sequence[str | bytes | "
                    "os.PathLike], file_offsets: Sequence[int] | None = None) -> int"),
            help::aio_handle_async_pread_many)
        .def(
            "async_pwrite_many",
            [](AioHandle& self, nb::handle buffers, nb::handle filenames, nb::handle file_offsets) {
                return self.start_many(Direction::write, buffers, filenames, file_offsets);
            },
            "buffers"_any, "filenames"_any, "file_offsets"_a = nb::none(),
            nb::sig("def async_pwrite_many(self, buffers: Sequence[torch.Tensor], filenames: Sequence[str | bytes | "
                    "os.PathLike], file_offsets: Sequence[int] | None = None) -> int"),
            help::aio_handle_async_pwrite_many)
        .def("wait", &AioHandle::wait, help::aio_handle_wait)

        .def(
            "new_cpu_locked_tensor",
            [](const AioHandle&, nb::handle num_elem, nb::handle example) {
                return new_cpu_locked_tensor(integer_of(num_elem, "num_elem"), example);
            },
            "num_elem"_any, "example_tensor"_any,
            nb::sig("def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor"),
            help::aio_handle_new_cpu_locked_tensor)
        .def(
            "free_cpu_locked_tensor", [](const AioHandle&, nb::handle tensor) { return free_cpu_locked_tensor(tensor); },
            "tensor"_any,
            nb::sig("def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool"),
            help::aio_handle_free_cpu_locked_tensor)
        .def(
            "is_pinned", [](const AioHandle&, nb::handle buffer) { return is_pinned(buffer); },
            "buffer"_any,
            nb::sig("def is_pinned(self, buffer: torch.Tensor) -> bool"),
            help::aio_handle_is_pinned)
        .def("stats", [](AioHandle& self) { return self.session().stats(); }, help::aio_handle_stats);
    return handle;
}

void bind_handle(nb::module_& module) {
    define_handle(module, "aio_handle", help::aio_handle)
        .def(
            "__init__",
            [](AioHandle* self, nb::handle block_size, nb::handle queue_depth, Flag single_submit, Flag overlap_events,
               nb::handle intra_op_parallelism, const nb::object& num_threads, std::string backend) {
                new (self) AioHandle(handle_options(block_size, queue_depth, single_submit, intra_op_parallelism, num_threads,
                                                    std::move(backend)),
                                     overlap_events);
            },
            "block_size"_any = kHandleBlockSize, "queue_depth"_any = kHandleQueueDepth, "single_submit"_a = false,
            "overlap_events"_a = false, "intra_op_parallelism"_any = 1, nb::kw_only(), "num_threads"_a = nb::none(),
            "backend"_a = "auto",
            nb::sig("def __init__(self, block_size: int = 1048576, queue_depth: int = 128, single_submit: bool = False, "
                    "overlap_events: bool = False, intra_op_parallelism: int = 1, *, num_threads: int | None = None, backend: "
                    "str = 'auto') -> None"));

    const auto alone = [](Direction direction) {
        return [direction](nb::handle buffer, nb::handle filename, nb::handle block_size, nb::handle queue_depth, Flag single_submit,
                           Flag overlap_events, Flag validate) {
            return transfer_alone(direction, buffer, filename, integer_of(block_size, "block_size"), integer_of(queue_depth, "queue_depth"),
                                  single_submit, overlap_events, validate);
        };
    };
    module.def("aio_read", alone(Direction::read),
               "buffer"_any, "filename"_any, "block_size"_any, "queue_depth"_any, "single_submit"_a, "overlap_events"_a,
               "validate"_a,
               nb::sig("def aio_read(buffer: torch.Tensor, filename: str | bytes | os.PathLike, block_size: int, queue_depth: "
                       "int, single_submit: bool, overlap_events: bool, validate: bool) -> int"),
               help::aio_read);
    module.def("aio_write", alone(Direction::write),
               "buffer"_any, "filename"_any, "block_size"_any, "queue_depth"_any, "single_submit"_a, "overlap_events"_a,
               "validate"_a,
               nb::sig("def aio_write(buffer: torch.Tensor, filename: str | bytes | os.PathLike, block_size: int, "
                       "queue_depth: int, single_submit: bool, overlap_events: bool, validate: bool) -> int"),
               help::aio_write);
    module.def("deepspeed_memcpy", &copy_bytes,
               "dest"_any, "src"_any,
               nb::sig("def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int"),
               help::deepspeed_memcpy);
}

}  // namespace deepnvme::bindings
