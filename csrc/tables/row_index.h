// From the numbers of rows to the slots of a cache: a hash table with linear probing.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace deepnvme::tables {

// Has no more rows than it was made for.
class RowIndex {
public:
    static constexpr std::uint32_t kNone = UINT32_MAX;

    explicit RowIndex(std::uint64_t most_rows) : entries_(std::bit_ceil(2 * most_rows + 2)), mask_(entries_.size() - 1) {}

    // The slot of a row, or kNone.
    std::uint32_t find(std::uint64_t row) const noexcept {
        for (std::size_t i = home_of(row);; i = (i + 1) & mask_) {
            if (entries_[i].slot == kNone) return kNone;
            if (entries_[i].row == row) return entries_[i].slot;
        }
    }
    // Have the memory of a row that is looked for soon on its way to the processor.
    void prefetch(std::uint64_t row) const noexcept { __builtin_prefetch(&entries_[home_of(row)]); }

    // The row must not be there.
    void insert(std::uint64_t row, std::uint32_t slot) noexcept {
        std::size_t i = home_of(row);
        while (entries_[i].slot != kNone) i = (i + 1) & mask_;
        entries_[i] = {row, slot};
    }

    // The row must be there. Those behind it that are not where they belong move up, so that no gap cuts them off.
    void erase(std::uint64_t row) noexcept {
        std::size_t gap = home_of(row);
        while (entries_[gap].row != row || entries_[gap].slot == kNone) gap = (gap + 1) & mask_;
        for (std::size_t i = (gap + 1) & mask_; entries_[i].slot != kNone; i = (i + 1) & mask_) {
            const std::size_t displaced = (i - home_of(entries_[i].row)) & mask_;
            if (displaced < ((i - gap) & mask_)) continue;
            entries_[gap] = entries_[i];
            gap = i;
        }
        entries_[gap] = {};
    }

    static std::uint64_t bytes_for(std::uint64_t most_rows) noexcept { return std::bit_ceil(2 * most_rows + 2) * sizeof(Entry); }

private:
    struct Entry {
        std::uint64_t row = 0;
        std::uint32_t slot = kNone;
    };

    std::size_t home_of(std::uint64_t row) const noexcept {
        const std::uint64_t mixed = (row ^ row >> 32) * 0x9E3779B97F4A7C15u;
        return (mixed >> 20) & mask_;
    }

    std::vector<Entry> entries_;
    std::size_t mask_;
};

}  // namespace deepnvme::tables
