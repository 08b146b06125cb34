// Page-locked memory as a Python object: tensors made from it are views that keep it alive.
#pragma once

#include <pybind11/pybind11.h>

#include "core/pinned_memory.h"

namespace deepnvme::bindings {

namespace py = pybind11;

// Recorded among the pinned ranges for as long as it lives, or until free_cpu_locked_tensor takes it off.
class PinnedBuffer {
public:
    // Throws std::bad_alloc.
    explicit PinnedBuffer(std::size_t nbytes) : memory_(nbytes) { pinned_ranges::add(memory_.data(), memory_.size()); }
    ~PinnedBuffer() { pinned_ranges::remove(memory_.data()); }
    PinnedBuffer(const PinnedBuffer&) = delete;
    PinnedBuffer& operator=(const PinnedBuffer&) = delete;

    const PinnedMemory& memory() const noexcept { return memory_; }

private:
    PinnedMemory memory_;
};

// Warns once in the process when the memlock limit is too low for the lock.
std::unique_ptr<PinnedBuffer> make_pinned_buffer(std::int64_t nbytes);

// Whether the whole tensor lies in page-locked memory, ours or torch's.
bool is_pinned(py::handle tensor);

void bind_pinned_buffer(py::module_& module);

}  // namespace deepnvme::bindings
