// The rows of a table that are in memory: those used most often, and those changed and not yet written.
//
// No method reads or writes a file. The caller has one call at a time, but for end_reading().
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "tables/geometry.h"
#include "tables/live_reads.h"
#include "tables/row_index.h"
#include "tables/use_counts.h"

namespace deepnvme::tables {

// A version of a record in memory, and where it is on the drive.
struct Stored {
    std::uint64_t epoch = 0;    // of the newest version; 0 if none was ever written
    std::uint8_t version = 1;   // which of the two that is; a row that was never written is to have its first
};

enum class Admission {
    by_use,  // only instead of a row that is used less often
    always,  // instead of some row that need not stay
};

class RowCache {
public:
    using Slot = std::uint32_t;
    static constexpr Slot kNone = RowIndex::kNone;

    // `memory`: slots * slot_bytes(record_bytes) bytes, which stay as long as the cache.
    RowCache(std::uint64_t rows, std::uint64_t record_bytes, std::uint64_t slots, std::byte* memory);

    // Records begin at multiples of 8 bytes.
    static std::uint64_t slot_bytes(std::uint64_t record_bytes) noexcept { return (record_bytes + 7) / 8 * 8; }
    // Of everything besides the records.
    static std::uint64_t overhead_bytes(std::uint64_t rows, std::uint64_t slots) noexcept;

    Slot find(std::uint64_t row) const noexcept { return index_.find(row); }
    void prefetch(std::uint64_t row) const noexcept { index_.prefetch(row); }
    void prefetch_record(Slot slot) const noexcept { __builtin_prefetch(record(slot)); }
    std::byte* record(Slot slot) noexcept { return memory_ + slot * slot_bytes_; }
    const std::byte* record(Slot slot) const noexcept { return memory_ + slot * slot_bytes_; }

    void count_use(std::uint64_t row) noexcept { uses_.add(row); }

    // Have a row that is not there. Returns its slot, or kNone if it is not admitted. The caller fills in the record.
    Slot insert(std::uint64_t row, Stored stored, Admission admission);
    // Drop what is neither changed nor being written.
    void clear();

    // -- changes, of tables that have two versions

    // Replace a row's record by another. It then belongs to `epoch`.
    void change(Slot slot, const std::byte* record, std::uint64_t epoch);
    // Take changed rows, the longest unchanged first, to be written now: up to `most`. They stay until written().
    std::vector<Slot> take_changed(std::size_t most);
    // They were written, or could not be. What was changed meanwhile has still to be written.
    void written(std::span<const Slot> slots, bool succeeded) noexcept;
    // Drop all that was changed since the last commit, as far as it is here. No row is being written.
    void drop_changed(std::uint64_t epoch);

    // A read under way: from when it begins until end_reading(), changes are remembered, so that what was read before is known to be old.
    struct Reading {
        std::uint64_t changes;  // how many were made before
        std::size_t place;
    };
    Reading begin_reading() noexcept;
    void end_reading(const Reading& reading) noexcept { reads_.end(reading.place); }
    // Whether a row was, or perhaps was, changed after so many changes.
    bool changed_since(std::uint64_t row, std::uint64_t changes) const;

    std::uint64_t row_of(Slot slot) const noexcept { return slots_[slot].row; }
    Stored stored(Slot slot) const noexcept { return {slots_[slot].epoch, slots_[slot].version}; }
    std::uint64_t slots() const noexcept { return slots_.size(); }
    std::uint64_t used() const noexcept { return used_ - free_.size(); }
    std::uint64_t changed() const noexcept { return changed_; }
    std::uint64_t writing() const noexcept { return writing_; }

private:
    struct Entry {
        std::uint64_t row = 0;
        std::uint64_t epoch = 0;
        std::uint8_t version = 1;
        bool present = false;
        bool changed = false;
        bool writing = false;
        std::uint8_t protection = 0;  // looks of the hand that it survives, however seldom it is used
    };

    bool may_drop(const Entry& entry) const noexcept { return entry.present && !entry.changed && !entry.writing; }
    Slot slot_for(std::uint64_t row, Admission admission);
    void drop(Slot slot);

    const std::uint64_t record_bytes_;
    const std::uint64_t slot_bytes_;
    std::byte* const memory_;
    std::vector<Entry> slots_;
    std::vector<Slot> free_;
    RowIndex index_;
    UseCounts uses_;
    std::uint64_t used_ = 0;  // slots that were ever used, free ones among them
    std::uint64_t hand_ = 0;
    std::uint64_t write_hand_ = 0;
    std::uint64_t changed_ = 0, writing_ = 0;
    // Forget changes that no read under way has to know of; and, if these are too many nevertheless, the oldest half.
    void forget_changes();
    LiveReads reads_;
    std::uint64_t changes_ = 0;
    std::uint64_t forgotten_ = 0;  // changes up to this one are not remembered any more
    std::unordered_map<std::uint64_t, std::uint64_t> changed_while_reading_;  // row -> the number of the change
};

}  // namespace deepnvme::tables
