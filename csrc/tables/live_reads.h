// Which reads of a table are under way, by the number of changes that had been made before each.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace deepnvme::tables {

// begin() and oldest() are called one at a time; end() by any thread at any time, in forked children too, and so nothing is locked.
class LiveReads {
public:
    static constexpr std::uint64_t kNone = UINT64_MAX;

    // Returns the place to give to end().
    std::size_t begin(std::uint64_t changes) noexcept {
        ++live_;
        for (std::size_t place = 0; place < began_.size(); ++place) {
            if (began_[place].load() != kNone) continue;
            began_[place] = changes;
            return place;
        }
        if (unplaced_.load() == 0) oldest_unplaced_ = changes;
        ++unplaced_;
        return began_.size();
    }
    void end(std::size_t place) noexcept {
        if (place < began_.size()) began_[place] = kNone;
        else --unplaced_;
        --live_;
    }
    bool any() const noexcept { return live_.load() > 0; }
    // The number of changes before the read that began first, or less; kNone if there is no read.
    std::uint64_t oldest() const noexcept {
        std::uint64_t oldest = unplaced_.load() > 0 ? oldest_unplaced_ : kNone;
        for (const auto& began : began_) oldest = std::min(oldest, began.load());
        return oldest;
    }

    LiveReads() noexcept {
        for (auto& began : began_) began = kNone;
    }

private:
    std::array<std::atomic<std::uint64_t>, 64> began_;
    std::atomic<std::uint64_t> live_ = 0;
    std::atomic<std::uint64_t> unplaced_ = 0;  // reads for which there was no place
    std::uint64_t oldest_unplaced_ = 0;
};

}  // namespace deepnvme::tables
