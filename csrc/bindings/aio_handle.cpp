#include "bindings/aio_handle.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>
#include <vector>

#include "bindings/bind_functions.h"
#include "bindings/pinned_buffer.h"

namespace deepnvme::bindings {

namespace {

using namespace pybind11::literals;

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
        py::gil_scoped_release release;
        return compare_with_file(request.memory, request.length, request.offset, pending.path);
    }
    constexpr std::uint64_t kPart = 16 << 20;  // the host need not have room for what the device has
    const py::object& bytes = pending.owner;
    for (std::uint64_t at = 0; at < request.length; at += kPart) {
        const std::uint64_t length = std::min(kPart, request.length - at);
        const py::object on_host = bytes.attr("narrow")(0, at, length).attr("cpu")();
        const std::byte* memory = memory_of(on_host, Direction::write).data;
        py::gil_scoped_release release;
        compare_with_file(memory, length, request.offset + at, pending.path);
    }
}

std::int64_t worker_count(std::int64_t intra_op_parallelism, const py::object& num_threads) {
    if (num_threads.is_none()) return intra_op_parallelism;
    const std::int64_t count = integer_of(num_threads, "num_threads");
    if (intra_op_parallelism != 1 && count != intra_op_parallelism)
        throw py::value_error("num_threads is another name for intra_op_parallelism, got " + std::to_string(count) + " and " +
                              std::to_string(intra_op_parallelism));
    return count;
}

EngineOptions checked_options(std::int64_t block_size, std::int64_t queue_depth, bool single_submit,
                              std::int64_t intra_op_parallelism, std::string backend) {
    if (intra_op_parallelism < 1)
        throw py::value_error("intra_op_parallelism must be in [1, 256], got " + std::to_string(intra_op_parallelism));
    return {std::move(backend), block_size, queue_depth, intra_op_parallelism, single_submit};
}

py::object new_cpu_locked_tensor(std::int64_t num_elem, py::handle example) {
    require_tensor(example);
    if (num_elem < 0) throw py::value_error("num_elem must not be negative, got " + std::to_string(num_elem));
    const auto torch = py::module_::import("torch");
    if (num_elem == 0) return torch.attr("empty")(0, "dtype"_a = example.attr("dtype"));
    std::int64_t nbytes;
    if (__builtin_mul_overflow(num_elem, example.attr("element_size")().cast<std::int64_t>(), &nbytes))
        throw py::value_error("num_elem is too large: " + std::to_string(num_elem));
    // Through bytes, since frombuffer knows fewer dtypes than view does.
    const py::object buffer = py::cast(make_pinned_buffer(nbytes));
    return torch.attr("frombuffer")(buffer, "dtype"_a = torch.attr("uint8")).attr("view")(example.attr("dtype"));
}

bool free_cpu_locked_tensor(py::handle tensor) {
    require_tensor(tensor);
    return pinned_ranges::remove(reinterpret_cast<const std::byte*>(tensor.attr("data_ptr")().cast<std::uintptr_t>()));
}

int transfer_alone(Direction direction, py::handle buffer, py::handle filename, std::int64_t block_size, std::int64_t queue_depth,
                   bool single_submit, bool overlap_events, bool validate) {
    AioHandle handle(checked_options(block_size, queue_depth, single_submit, 1, "auto"), overlap_events);
    handle.finish(direction, buffer, filename, 0, validate);
    return 0;
}

int copy_bytes(py::handle dest, py::handle src) {
    const TensorMemory to = memory_of(dest, Direction::read);
    const TensorMemory from = memory_of(src, Direction::write);
    if (to.nbytes != from.nbytes)
        throw py::value_error("dest has " + std::to_string(to.nbytes) + " bytes and src " + std::to_string(from.nbytes));
    if (to.nbytes == 0) return 0;
    bytes_of(to.tensor).attr("copy_")(bytes_of(from.tensor));  // by torch, with all its threads
    return 0;
}

}  // namespace

AioHandle::AioHandle(EngineOptions options, bool overlap_events) : session_(options), overlap_events_(overlap_events) {}

AioHandle::AioHandle(std::unique_ptr<Engine> engine, bool overlap_events)
    : session_(std::move(engine)), overlap_events_(overlap_events) {}

EngineOptions handle_options(py::handle block_size, py::handle queue_depth, bool single_submit, py::handle intra_op_parallelism,
                             const py::object& num_threads, std::string backend) {
    const auto workers = worker_count(integer_of(intra_op_parallelism, "intra_op_parallelism"), num_threads);
    return checked_options(integer_of(block_size, "block_size"), integer_of(queue_depth, "queue_depth"), single_submit, workers,
                           std::move(backend));
}

int AioHandle::start(Direction direction, py::handle buffer, py::handle filename, std::int64_t offset, bool validate) {
    started_.push_back(session_.transfer(direction, buffer, filename, offset, validate));
    return 0;
}

int AioHandle::start_many(Direction direction, py::handle buffers, py::handle filenames, py::handle offsets) {
    started_.push_back(session_.transfer_many(direction, buffers, filenames, offsets));
    return 0;
}

int AioHandle::start_descriptor(py::handle buffer, int fd, std::int64_t offset) {
    started_.push_back(session_.write_descriptor(buffer, fd, offset));
    return 0;
}

int AioHandle::finish(Direction direction, py::handle buffer, py::handle filename, std::int64_t offset, bool validate) {
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

py::class_<AioHandle> define_handle(py::module_& module, const char* name) {
    const auto options = [](AioHandle& self) -> const EngineOptions& { return self.session().engine().options(); };

    py::class_<AioHandle> handle(module, name, py::module_local());
    handle
        .def("get_block_size", [options](AioHandle& self) { return options(self).block_size; })
        .def("get_queue_depth", [options](AioHandle& self) { return options(self).queue_depth; })
        .def("get_single_submit", [options](AioHandle& self) { return options(self).single_submit; })
        .def("get_overlap_events", [](const AioHandle& self) { return self.overlap_events(); })
        .def("get_intra_op_parallelism", [options](AioHandle& self) { return options(self).num_threads; })
        .def("get_thread_count", [options](AioHandle& self) { return options(self).num_threads; })
        .def("get_alignment", [options](AioHandle& self) { return options(self).num_threads * kDeepSpeedAlignment; })

        .def(
            "read",
            [](AioHandle& self, py::handle buffer, py::handle filename, bool validate, py::handle file_offset) {
                self.finish(Direction::read, buffer, filename, integer_of(file_offset, "file_offset"), validate);
                return 0;
            },
            "buffer"_a, "filename"_a, "validate"_a, "file_offset"_a = 0)
        .def(
            "write",
            [](AioHandle& self, py::handle buffer, py::handle filename, bool validate, py::handle file_offset) {
                self.finish(Direction::write, buffer, filename, integer_of(file_offset, "file_offset"), validate);
                return 0;
            },
            "buffer"_a, "filename"_a, "validate"_a, "file_offset"_a = 0)
        .def(
            "pread",
            [](AioHandle& self, py::handle buffer, py::handle filename, bool validate, bool async, py::handle file_offset) {
                return async ? self.start(Direction::read, buffer, filename, integer_of(file_offset, "file_offset"), validate)
                             : self.finish(Direction::read, buffer, filename, integer_of(file_offset, "file_offset"), validate);
            },
            "buffer"_a, "filename"_a, "validate"_a, "async"_a, "file_offset"_a = 0)
        .def(
            "pwrite",
            [](AioHandle& self, py::handle buffer, py::handle filename, bool validate, bool async, py::handle file_offset) {
                return async ? self.start(Direction::write, buffer, filename, integer_of(file_offset, "file_offset"), validate)
                             : self.finish(Direction::write, buffer, filename, integer_of(file_offset, "file_offset"), validate);
            },
            "buffer"_a, "filename"_a, "validate"_a, "async"_a, "file_offset"_a = 0)
        .def(
            "sync_pread",
            [](AioHandle& self, py::handle buffer, py::handle filename, py::handle file_offset) {
                return self.finish(Direction::read, buffer, filename, integer_of(file_offset, "file_offset"), false);
            },
            "buffer"_a, "filename"_a, "file_offset"_a = 0)
        .def(
            "sync_pwrite",
            [](AioHandle& self, py::handle buffer, py::handle filename, py::handle file_offset) {
                return self.finish(Direction::write, buffer, filename, integer_of(file_offset, "file_offset"), false);
            },
            "buffer"_a, "filename"_a, "file_offset"_a = 0)
        .def(
            "async_pread",
            [](AioHandle& self, py::handle buffer, py::handle filename, py::handle file_offset) {
                return self.start(Direction::read, buffer, filename, integer_of(file_offset, "file_offset"), false);
            },
            "buffer"_a, "filename"_a, "file_offset"_a = 0)
        .def(
            "async_pwrite",
            [](AioHandle& self, py::handle buffer, const py::int_& fd, py::handle file_offset) {
                const long number = PyLong_AsLong(fd.ptr());
                if (PyErr_Occurred()) throw py::error_already_set();
                if (number < 0 || number > std::numeric_limits<int>::max())
                    throw IoError(EBADF, "use of file descriptor " + std::to_string(number), "");
                return self.start_descriptor(buffer, static_cast<int>(number), integer_of(file_offset, "file_offset"));
            },
            "buffer"_a, "fd"_a, "file_offset"_a = 0)
        .def(
            "async_pwrite",
            [](AioHandle& self, py::handle buffer, py::handle filename, py::handle file_offset) {
                return self.start(Direction::write, buffer, filename, integer_of(file_offset, "file_offset"), false);
            },
            "buffer"_a, "filename"_a, "file_offset"_a = 0)
        .def(
            "async_pread_many",
            [](AioHandle& self, py::handle buffers, py::handle filenames, py::handle file_offsets) {
                return self.start_many(Direction::read, buffers, filenames, file_offsets);
            },
            "buffers"_a, "filenames"_a, "file_offsets"_a = py::none())
        .def(
            "async_pwrite_many",
            [](AioHandle& self, py::handle buffers, py::handle filenames, py::handle file_offsets) {
                return self.start_many(Direction::write, buffers, filenames, file_offsets);
            },
            "buffers"_a, "filenames"_a, "file_offsets"_a = py::none())
        .def("wait", &AioHandle::wait)

        .def(
            "new_cpu_locked_tensor",
            [](const AioHandle&, py::handle num_elem, py::handle example) {
                return new_cpu_locked_tensor(integer_of(num_elem, "num_elem"), example);
            },
            "num_elem"_a, "example_tensor"_a)
        .def(
            "free_cpu_locked_tensor", [](const AioHandle&, py::handle tensor) { return free_cpu_locked_tensor(tensor); }, "tensor"_a)
        .def(
            "is_pinned", [](const AioHandle&, py::handle buffer) { return is_pinned(buffer); }, "buffer"_a)
        .def("stats", [](AioHandle& self) { return self.session().stats(); });
    return handle;
}

void bind_handle(py::module_& module) {
    define_handle(module, "aio_handle")
        .def(py::init([](py::handle block_size, py::handle queue_depth, bool single_submit, bool overlap_events,
                         py::handle intra_op_parallelism, const py::object& num_threads, std::string backend) {
                 return std::make_unique<AioHandle>(handle_options(block_size, queue_depth, single_submit, intra_op_parallelism,
                                                                   num_threads, std::move(backend)),
                                                    overlap_events);
             }),
             "block_size"_a = kHandleBlockSize, "queue_depth"_a = kHandleQueueDepth, "single_submit"_a = false,
             "overlap_events"_a = false, "intra_op_parallelism"_a = 1, py::kw_only(), "num_threads"_a = py::none(),
             "backend"_a = "auto");

    const auto alone = [](Direction direction) {
        return [direction](py::handle buffer, py::handle filename, py::handle block_size, py::handle queue_depth, bool single_submit,
                           bool overlap_events, bool validate) {
            return transfer_alone(direction, buffer, filename, integer_of(block_size, "block_size"), integer_of(queue_depth, "queue_depth"),
                                  single_submit, overlap_events, validate);
        };
    };
    module.def("aio_read", alone(Direction::read), "buffer"_a, "filename"_a, "block_size"_a, "queue_depth"_a, "single_submit"_a,
               "overlap_events"_a, "validate"_a);
    module.def("aio_write", alone(Direction::write), "buffer"_a, "filename"_a, "block_size"_a, "queue_depth"_a, "single_submit"_a,
               "overlap_events"_a, "validate"_a);
    module.def("deepspeed_memcpy", &copy_bytes, "dest"_a, "src"_a);
}

}  // namespace deepnvme::bindings
