// How long blocks take, sorted into bins: fine enough for a percentile, few enough to keep for as long as the engine lives.
//
// Log-linear: eight bins an octave, so that a bin's two ends differ by at most 12.5 %, and below 16 ns a bin a nanosecond. 496 of
// them hold every duration that 64 bits can, which leaves no range to choose and nothing that falls outside of it. Counts of 8 bytes
// are 3968 bytes for each worker, and as much for the sum.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace deepnvme {

constexpr std::size_t kLatencyBins = 496;

constexpr std::size_t latency_bin(std::uint64_t nanoseconds) noexcept {
    const int shift = std::max(static_cast<int>(std::bit_width(nanoseconds)), 4) - 4;  // all but the four leading bits
    return static_cast<std::size_t>(shift) * 8 + static_cast<std::size_t>(nanoseconds >> shift);
}

// In nanoseconds.
constexpr std::uint64_t longest_in_bin(std::size_t bin) noexcept {
    const std::size_t shift = bin < 16 ? 0 : bin / 8 - 1;
    return (std::uint64_t{bin - shift * 8 + 1} << shift) - 1;
}

static_assert(latency_bin(UINT64_MAX) == kLatencyBins - 1 && longest_in_bin(kLatencyBins - 1) == UINT64_MAX);

}  // namespace deepnvme
