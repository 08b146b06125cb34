#include "tables/row_cache.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace deepnvme::tables {

namespace {

// Rows looked at to find one that is used seldom. 4 and 16 gave the same hit rate (simulated, see use_counts.h).
constexpr int kCandidates = 8;
// Looks of the hand that a row survives which was fetched on purpose: so it stays while half as many others come as there are slots.
constexpr std::uint8_t kProtection = kCandidates / 2;
// Changes remembered for reads under way, of some 50 bytes each, or as many as there are slots if those are more: a step of a training
// changes no more rows while the next ones are read ahead. A read that nobody asks for would have them grow without bound: of one that
// is older than what is remembered, all that is delivered later is taken for changed.
constexpr std::size_t kLeastRemembered = 1 << 16;

}  // namespace

RowCache::RowCache(std::uint64_t rows, std::uint64_t record_bytes, std::uint64_t slots, std::byte* memory)
    : record_bytes_(record_bytes), slot_bytes_(slot_bytes(record_bytes)), memory_(memory), slots_(slots), index_(slots), uses_(rows, slots) {}

std::uint64_t RowCache::overhead_bytes(std::uint64_t rows, std::uint64_t slots) noexcept {
    return slots * sizeof(Entry) + RowIndex::bytes_for(slots) + UseCounts::bytes_for(rows, slots);
}

RowCache::Slot RowCache::insert(std::uint64_t row, Stored stored, Admission admission) {
    const Slot slot = slot_for(row, admission);
    if (slot == kNone) return kNone;
    Entry& entry = slots_[slot];
    entry = {row, stored.epoch, stored.version, true};
    if (admission == Admission::always) entry.protection = kProtection;
    index_.insert(row, slot);
    return slot;
}

RowCache::Slot RowCache::slot_for(std::uint64_t row, Admission admission) {
    if (!free_.empty()) {
        const Slot slot = free_.back();
        free_.pop_back();
        return slot;
    }
    if (used_ < slots_.size()) return static_cast<Slot>(used_++);
    const int candidates = static_cast<int>(std::min<std::uint64_t>(kCandidates, slots_.size()));
    // Where all must stay but a few, those are not searched for: unless the row has to be admitted.
    std::uint64_t looks = admission == Admission::always ? (kProtection + 1) * slots_.size() : 8 * candidates;
    Slot least = kNone;
    int least_uses = UINT8_MAX + 1;
    for (int seen = 0; seen < candidates && looks > 0; --looks) {
        const auto slot = static_cast<Slot>(hand_);
        hand_ = hand_ + 1 == slots_.size() ? 0 : hand_ + 1;
        Entry& entry = slots_[slot];
        if (!may_drop(entry)) continue;
        if (entry.protection > 0) {
            --entry.protection;
            continue;
        }
        ++seen;
        const int uses = uses_.of(entry.row);
        if (uses >= least_uses) continue;
        least = slot;
        least_uses = uses;
    }
    if (least == kNone || (admission == Admission::by_use && uses_.of(row) <= least_uses)) return kNone;
    index_.erase(slots_[least].row);
    return least;
}

void RowCache::drop(Slot slot) {
    index_.erase(slots_[slot].row);
    slots_[slot] = {};
    free_.push_back(slot);
}

void RowCache::clear() {
    for (std::uint64_t slot = 0; slot < used_; ++slot) {
        Entry& entry = slots_[slot];
        if (!entry.present || entry.changed || entry.writing) continue;
        drop(static_cast<Slot>(slot));
    }
}

void RowCache::change(Slot slot, const std::byte* record, std::uint64_t epoch) {
    Entry& entry = slots_[slot];
    ++changes_;
    if (!reads_.any()) {
        // Only if there are any: to clear an empty map takes as long as it was ever large.
        if (!changed_while_reading_.empty()) changed_while_reading_.clear();
        forgotten_ = changes_ - 1;
    } else {
        if (changed_while_reading_.size() >= std::max(kLeastRemembered, slots_.size())) forget_changes();
        changed_while_reading_[entry.row] = changes_;
    }
    std::memcpy(this->record(slot), record, record_bytes_);
    if (entry.epoch != epoch) {
        entry.version ^= 1;
        entry.epoch = epoch;
    }
    changed_ += !std::exchange(entry.changed, true);
}

std::vector<RowCache::Slot> RowCache::take_changed(std::size_t most) {
    std::vector<Slot> taken;
    for (std::uint64_t looks = 0; looks < used_ && taken.size() < most && taken.size() < changed_; ++looks) {
        write_hand_ = write_hand_ + 1 >= used_ ? 0 : write_hand_ + 1;
        const auto slot = static_cast<Slot>(write_hand_);
        Entry& entry = slots_[slot];
        if (entry.changed && !entry.writing) taken.push_back(slot);
    }
    for (const Slot slot : taken) {
        slots_[slot].changed = false;
        slots_[slot].writing = true;
    }
    changed_ -= taken.size();
    writing_ += taken.size();
    return taken;
}

void RowCache::written(std::span<const Slot> slots, bool succeeded) noexcept {
    for (const Slot slot : slots) {
        Entry& entry = slots_[slot];
        entry.writing = false;
        --writing_;
        if (!succeeded) changed_ += !std::exchange(entry.changed, true);
    }
}

void RowCache::drop_changed(std::uint64_t epoch) {
    for (std::uint64_t slot = 0; slot < used_; ++slot) {
        Entry& entry = slots_[slot];
        if (!entry.present || entry.epoch != epoch) continue;
        changed_ -= entry.changed;
        drop(static_cast<Slot>(slot));
    }
}

void RowCache::forget_changes() {
    const std::uint64_t kept = changed_while_reading_.size() / 2;
    const std::uint64_t oldest = std::min(reads_.oldest(), changes_ - 1);
    std::erase_if(changed_while_reading_, [&](const auto& changed) { return changed.second <= oldest; });
    if (changed_while_reading_.size() <= kept) return;
    forgotten_ = changes_ - 1 - std::min(kept, changes_ - 1);
    std::erase_if(changed_while_reading_, [&](const auto& changed) { return changed.second <= forgotten_; });
}

RowCache::Reading RowCache::begin_reading() noexcept { return {changes_, reads_.begin(changes_)}; }

bool RowCache::changed_since(std::uint64_t row, std::uint64_t changes) const {
    if (changes < forgotten_) return true;
    if (changed_while_reading_.empty()) return false;
    const auto found = changed_while_reading_.find(row);
    return found != changed_while_reading_.end() && found->second > changes;
}

}  // namespace deepnvme::tables
