// What crosses between Python and C++: tensors, numbers and paths one way, errors the other.
//
// No torch header is included: a tensor is a Python object whose attributes are read, so that one binary serves every torch.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "engine/engine.h"

namespace deepnvme::bindings {

namespace py = pybind11;

enum class Direction { read, write };

// The memory of a tensor for the time of a transfer.
struct TensorMemory {
    py::object tensor;   // the tensor, or the copy made of one that is not contiguous
    py::object storage;  // of that tensor at the time of the call: what has to outlive the transfer
    std::byte* data;
    std::uint64_t nbytes;
    std::optional<DeviceMemory> device;  // with the stream that is current; empty for the host's memory
};

// Throws TypeError for what is no dense tensor, ValueError for one that cannot be transferred in this direction as it is. `verb`: what
// is to be done with the tensor's own memory, where that is more than to read it.
TensorMemory memory_of(py::handle tensor, Direction direction, const char* verb = "read into");

// The memory of an ordinary contiguous tensor on the host, looked up faster. Empty for others, which memory_of() may still take.
std::optional<std::span<std::byte>> plain_memory_of(py::handle tensor);

// What keeps a tensor's present memory. The tensor itself does not: `tensor.data = other`, `set_` and `swap_tensors` give it another.
py::object storage_of(py::handle tensor);

// A contiguous tensor's memory as a tensor of bytes of its own.
py::object bytes_of(py::handle tensor);

// Throws TypeError unless the object is a torch.Tensor.
void require_tensor(py::handle object);

// A Python integer. Throws TypeError naming the argument for anything else, ValueError for one beyond 64 bits.
std::int64_t integer_of(py::handle number, const char* name);

// The numbers in an array of uint64, valid for as long as `buffer` is. Throws TypeError naming the argument for anything else.
std::span<const std::uint64_t> numbers_in(const py::buffer_info& buffer, const char* name);

// str, bytes or os.PathLike, in the file system's encoding. Throws TypeError, or ValueError for a path with a NUL.
std::string path_of(py::handle path);

// The OSError, or subclass of it, with errno, text (and `suffix` after it) and filename set.
py::object to_python(const IoError& error, const std::string& suffix = "");

}  // namespace deepnvme::bindings
