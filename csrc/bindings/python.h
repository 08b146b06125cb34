// What the bindings share: tensors and paths taken apart, errors and waiting put into Python's terms.
//
// No torch header is included: a tensor is a Python object whose attributes are read, so that one binary serves every torch.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "engine/engine.h"

namespace deepnvme::bindings {

namespace py = pybind11;

enum class Direction { read, write };

// The memory of a tensor for the time of a transfer.
struct TensorMemory {
    py::object owner;  // the tensor, or the copy made of one that is not contiguous
    std::byte* data;
    std::uint64_t nbytes;
    std::optional<DeviceMemory> device;  // with the stream that is current; empty for the host's memory
};

// Throws TypeError for what is no dense tensor, ValueError for one that cannot be transferred in this direction as it is. `verb`: what
// is to be done with the tensor's own memory, where that is more than to read it.
TensorMemory memory_of(py::handle tensor, Direction direction, const char* verb = "read into");

// Throws TypeError unless the object is a torch.Tensor.
void require_tensor(py::handle object);

// A Python integer. Throws TypeError naming the argument for anything else, ValueError for one beyond 64 bits.
std::int64_t integer_of(py::handle number, const char* name);

// str, bytes or os.PathLike, in the file system's encoding. Throws TypeError, or ValueError for a path with a NUL.
std::string path_of(py::handle path);

// The OSError, or subclass of it, with errno, text and filename set.
py::object to_python(const IoError& error);

// Wait with the GIL released and signals attended to. False if the time ran out; throws what a signal handler raised.
bool wait_for(Request& request, std::optional<std::chrono::nanoseconds> timeout);

// A file opened once for many transfers.
struct OpenFile {
    std::shared_ptr<File> file;  // null once closed
    std::string path;
    std::uint64_t generation = process_generation();  // of the process that opened it: its lock is no use to a forked child

    File& get() const;
};

// A request together with what has to outlive it.
struct Pending {
    std::shared_ptr<Request> request;
    py::object owner;       // of the memory; let go when the request has ended, or after validation
    std::string path;       // of a transfer by path, for validation
    bool validate = false;  // compare tensor and file afterwards
};

// An engine whose requests keep their tensors alive. All methods are called with the GIL held.
class Session {
public:
    explicit Session(std::unique_ptr<Engine> engine);
    explicit Session(const EngineOptions& options);
    // Waits for every request, unless this is a forked child.
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    // Throws std::runtime_error in a forked child, where even asking could hang on a lock.
    Engine& engine() const;

    // `target`: a path or an OpenFile; for write_descriptor, an open file descriptor.
    std::shared_ptr<Pending> transfer(Direction direction, py::handle tensor, py::handle target, std::int64_t offset, bool validate = false);
    std::shared_ptr<Pending> write_descriptor(py::handle tensor, int fd, std::int64_t offset);
    std::shared_ptr<Pending> sync(py::handle target);

    // Wait for all requests, then close the engine.
    void close();

    // The same, but for an engine of another process nothing.
    void close_at_exit();

    py::dict stats() const;

private:
    void check_process() const;
    std::shared_ptr<Pending> remember(Pending pending);
    void forget_ended();

    std::unique_ptr<Engine> engine_;
    // Submitted and not known to have ended, oldest first.
    std::deque<std::shared_ptr<Pending>> pending_;
};

// Has functions of this module that throw IoError raise what to_python makes of it.
void bind_io_error(py::module_& module);
void bind_engine(py::module_& module);
void bind_handle(py::module_& module);
void bind_quantization(py::module_& module);

}  // namespace deepnvme::bindings
