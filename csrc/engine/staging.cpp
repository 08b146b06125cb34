#include "engine/staging.h"

#include <algorithm>
#include <bit>
#include <new>

namespace deepnvme {

namespace {

constexpr std::uint32_t kUnitsPerSlot = 16;  // 64 KiB of a slot of 1 MiB

constexpr std::uint32_t mask_of(std::uint32_t units) { return (1u << units) - 1; }

}  // namespace

StagingRing::StagingRing(std::uint32_t slot_size, std::uint32_t most_slots, std::uint32_t page_size, bool for_devices)
    : slot_size_(slot_size),
      unit_((slot_size + kUnitsPerSlot * page_size - 1) / (kUnitsPerSlot * page_size) * page_size),
      left_(most_slots),
      for_devices_(for_devices) {}

std::byte* StagingRing::lease(std::uint32_t size) {
    const std::uint32_t units = units_of(size), step = std::bit_ceil(units), all = units_of(slot_size_);
    while (first_free_ < slots_.size() && slots_[first_free_].used == mask_of(all)) ++first_free_;
    // The first that fits, so that the same memory is used again while its lines are in the cache.
    for (std::size_t i = first_free_; i < slots_.size(); ++i)
        for (std::uint32_t at = 0; at + units <= all; at += step)
            if (!(slots_[i].used >> at & mask_of(units))) {
                slots_[i].used |= mask_of(units) << at;
                return slots_[i].memory + std::size_t{at} * unit_;
            }
    if (left_ == 0) return nullptr;
    try {
        grow();
    } catch (const std::exception&) {
        if (slots_.empty()) throw;
        return nullptr;  // what there is will do
    }
    return lease(size);
}

void StagingRing::release(const std::byte* memory, std::uint32_t size) {
    const auto slot = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& each) {
        return memory >= each.memory && memory < each.memory + slot_size_;
    });
    const auto at = static_cast<std::uint32_t>((memory - slot->memory) / unit_);
    slot->used &= ~(mask_of(units_of(size)) << at);
    first_free_ = std::min(first_free_, static_cast<std::size_t>(slot - slots_.begin()));
}

void StagingRing::grow() {
    const std::uint32_t slots = std::clamp(static_cast<std::uint32_t>(kHugePage) / slot_size_, 1u, left_);
    Chunk chunk{PinnedMemory(std::size_t{slot_size_} * slots), {}};
    if (for_devices_) chunk.registration = CudaHostRegistration(chunk.memory.data(), chunk.memory.size());
    chunks_.push_back(std::move(chunk));
    for (std::uint32_t i = 0; i < slots; ++i) slots_.push_back({chunks_.back().memory.data() + std::size_t{i} * slot_size_, 0});
    left_ -= slots;
}

}  // namespace deepnvme
