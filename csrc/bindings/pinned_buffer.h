// Page-locked memory as a Python object: tensors made from it are views that keep it alive.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>

#include "core/cuda.h"
#include "core/pinned_memory.h"

namespace deepnvme::bindings {

namespace nb = nanobind;

// Recorded among the pinned ranges for as long as it lives, or until free_cpu_locked_tensor takes it off.
class PinnedBuffer {
public:
    // Throws like PinnedMemory.
    explicit PinnedBuffer(std::size_t nbytes, std::optional<int> node = {}) : memory_(nbytes, node) { pinned_ranges::add(memory_.data(), memory_.size()); }
    ~PinnedBuffer() { pinned_ranges::remove(memory_.data()); }
    PinnedBuffer(const PinnedBuffer&) = delete;
    PinnedBuffer& operator=(const PinnedBuffer&) = delete;

    const PinnedMemory& memory() const noexcept { return memory_; }

    // So that devices copy from and to it without a detour, and asynchronously. Throws IoError; some device's context is current.
    void register_with_cuda() {
        if (memory_.size() > 0) registration_ = CudaHostRegistration(memory_.data(), memory_.size());
    }

private:
    PinnedMemory memory_;
    CudaHostRegistration registration_;  // ends before its memory
};

// Registered with CUDA where torch uses it. Warns once in the process when the memlock limit is too low for the lock, or CUDA
// refuses, or the system does not place memory on the node asked for: the memory serves all the same.
std::unique_ptr<PinnedBuffer> make_pinned_buffer(std::int64_t nbytes, std::optional<int> node = {});

// Whether the whole tensor lies in page-locked memory, ours or torch's.
bool is_pinned(nb::handle tensor);

}  // namespace deepnvme::bindings
