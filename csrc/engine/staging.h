// A worker's slots of aligned memory, through which blocks of misaligned tensors pass.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/pinned_memory.h"

namespace deepnvme {

// Grows by a huge page at a time, up to its limit, so that a few small transfers don't pay for many large ones. Not thread-safe:
// it belongs to one worker.
class StagingRing {
public:
    StagingRing(std::uint32_t slot_size, std::uint32_t most_slots) : slot_size_(slot_size), left_(most_slots) {}

    // Null while every slot is in use. Throws std::bad_alloc.
    std::byte* lease() {
        if (free_.empty() && left_ > 0) grow();
        if (free_.empty()) return nullptr;
        std::byte* slot = free_.back();
        free_.pop_back();
        return slot;
    }
    void release(std::byte* slot) { free_.push_back(slot); }

private:
    void grow() {
        constexpr std::uint32_t kHugePage = 2u << 20;
        const std::uint32_t slots = std::clamp(kHugePage / slot_size_, 1u, left_);
        chunks_.emplace_back(std::size_t{slot_size_} * slots);
        for (std::uint32_t i = slots; i-- > 0;) free_.push_back(chunks_.back().data() + std::size_t{i} * slot_size_);
        left_ -= slots;
    }

    std::uint32_t slot_size_;
    std::uint32_t left_;  // slots not yet allocated
    std::vector<PinnedMemory> chunks_;
    std::vector<std::byte*> free_;  // the last one used is the next one leased: its lines may still be in the cache
};

}  // namespace deepnvme
