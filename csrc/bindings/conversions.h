// What crosses between Python and C++: tensors, numbers and paths one way, errors the other.
//
// No torch header is included: a tensor is a Python object whose attributes are read, so that one binary serves every torch.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "engine/engine.h"

namespace deepnvme::bindings {

namespace nb = nanobind;

enum class Direction { read, write };

// An argument that is a bool, or has a truth value as numbers have: DeepSpeed's callers may pass 0 or 1, which nanobind's own
// conversion refuses.
struct Flag {
    bool value;
    operator bool() const noexcept { return value; }
};

// The memory of a tensor for the time of a transfer.
struct TensorMemory {
    nb::object tensor;   // the tensor, or the copy made of one that is not contiguous
    nb::object storage;  // of that tensor at the time of the call: what has to outlive the transfer
    std::byte* data;
    std::uint64_t nbytes;
    std::optional<DeviceMemory> device;  // with the stream that is current; empty for the host's memory
};

// Throws TypeError for what is no dense tensor, ValueError for one that cannot be transferred in this direction as it is. `verb`: what
// is to be done with the tensor's own memory, where that is more than to read it.
TensorMemory memory_of(nb::handle tensor, Direction direction, const char* verb = "read into");

// The memory of an ordinary contiguous tensor on the host, looked up faster. Empty for others, which memory_of() may still take.
std::optional<std::span<std::byte>> plain_memory_of(nb::handle tensor);

// What keeps a tensor's present memory. The tensor itself does not: `tensor.data = other`, `set_` and `swap_tensors` give it another.
nb::object storage_of(nb::handle tensor);

// A contiguous tensor's memory as a tensor of bytes of its own.
nb::object bytes_of(nb::handle tensor);

// Throws TypeError unless the object is a torch.Tensor.
void require_tensor(nb::handle object);

// A Python integer. Throws TypeError naming the argument for anything else, ValueError for one beyond 64 bits.
std::int64_t integer_of(nb::handle number, const char* name);

// The buffer of an object, such as an array or bytes. While there is a view, its memory stays where it is.
class BufferView {
public:
    // Throws TypeError for an object that has none.
    explicit BufferView(nb::handle object);
    ~BufferView() { PyBuffer_Release(&view_); }
    BufferView(const BufferView&) = delete;
    BufferView& operator=(const BufferView&) = delete;

    const Py_buffer& operator*() const noexcept { return view_; }
    const Py_buffer* operator->() const noexcept { return &view_; }

private:
    Py_buffer view_;
};

// The numbers in an array of uint64, valid for as long as `buffer` is. Throws TypeError naming the argument for anything else.
std::span<const std::uint64_t> numbers_in(const BufferView& buffer, const char* name);

// str, bytes or os.PathLike, in the file system's encoding. Throws TypeError, or ValueError for a path with a NUL.
std::string path_of(nb::handle path);

// The same the other way: bytes that are no UTF-8 become surrogates. Also for a text with a path in it.
nb::object decoded(const std::string& text);

// str(object), in UTF-8.
std::string text_of(nb::handle object);

// The name of an object's type, with its module's unless it is a builtin.
std::string name_of_type(nb::handle object);

// The OSError, or subclass of it, with errno, text (and `suffix` after it) and filename set.
nb::object to_python(const IoError& error, const std::string& suffix = "");

// To be thrown: nanobind's own take no std::string.
nb::builtin_exception value_error(const std::string& text);

// Gives a RuntimeWarning at the line of the user's program that called this package. Throws where warnings are errors.
void warn(const std::string& text);
nb::builtin_exception type_error(const std::string& text);

}  // namespace deepnvme::bindings

template <>
struct nanobind::detail::type_caster<deepnvme::bindings::Flag> {
    NB_TYPE_CASTER(deepnvme::bindings::Flag, const_name("bool"))

    bool from_python(handle source, uint32_t, cleanup_list*) noexcept;
};
