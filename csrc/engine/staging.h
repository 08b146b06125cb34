// A worker's aligned memory, through which blocks pass whose own the drive cannot use: misaligned, or on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/cuda.h"
#include "core/pinned_memory.h"

namespace deepnvme {

// Slots of one block each, divided into units so that several small blocks share one. Grows by a huge page at a time, up to its
// limit: a few small transfers don't pay for many large ones. Not thread-safe: it belongs to one worker.
class StagingRing {
public:
    // `slot_size`: bytes, a multiple of `page_size`. `for_devices`: registered with CUDA, of which some context is current during
    // lease().
    StagingRing(std::uint32_t slot_size, std::uint32_t most_slots, std::uint32_t page_size, bool for_devices = false);

    // Memory for `size` bytes, at most slot_size, aligned to `size` if that is a power of two, and to a page in any case; null while
    // there is not enough. Throws std::bad_alloc, and IoError where CUDA does not take it.
    std::byte* lease(std::uint32_t size);
    // With the size that was leased.
    void release(const std::byte* memory, std::uint32_t size);

private:
    struct Slot {
        std::byte* memory;
        std::uint32_t used;  // a bit for each unit
    };
    struct Chunk {
        PinnedMemory memory;
        CudaHostRegistration registration;  // ends before its memory
    };

    std::uint32_t units_of(std::uint32_t size) const { return (size + unit_ - 1) / unit_; }
    void grow();

    std::uint32_t slot_size_;
    std::uint32_t unit_;
    std::uint32_t left_;  // slots not yet allocated
    bool for_devices_;
    std::vector<Chunk> chunks_;
    std::vector<Slot> slots_;
    std::size_t first_free_ = 0;  // no slot before this one has a free unit
};

}  // namespace deepnvme
