// A worker's slots of aligned memory, through which blocks of misaligned tensors pass.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/pinned_memory.h"

namespace deepnvme {

// Allocated when first used. Not thread-safe: it belongs to one worker.
class StagingRing {
public:
    StagingRing(std::uint32_t slot_size, std::uint32_t slots) : slot_size_(slot_size), slots_(slots) {}

    // Null while every slot is in use. Throws std::bad_alloc on first use.
    std::byte* lease() {
        if (!memory_.data()) {
            memory_ = PinnedMemory(std::size_t{slot_size_} * slots_);
            for (std::uint32_t i = slots_; i-- > 0;) free_.push_back(memory_.data() + std::size_t{i} * slot_size_);
        }
        if (free_.empty()) return nullptr;
        std::byte* slot = free_.back();
        free_.pop_back();
        return slot;
    }
    void release(std::byte* slot) { free_.push_back(slot); }

private:
    std::uint32_t slot_size_;
    std::uint32_t slots_;
    PinnedMemory memory_;
    std::vector<std::byte*> free_;  // the last one used is the next one leased: its lines may still be in the cache
};

}  // namespace deepnvme
