#include "core/copy.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <numeric>
#include <thread>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "core/numa.h"
#include "core/threads.h"

namespace deepnvme {

namespace {

// Whoever asked for less than this may well use it at once, and it displaces little.
constexpr std::uint64_t kWorthStreaming = 256 << 10;
constexpr std::uint64_t kLeastStreamed = 1 << 10;  // in one range of many

void stream(std::byte* to, const std::byte* from, std::size_t size) noexcept {
#ifdef __SSE2__
    const std::size_t head = std::min(-reinterpret_cast<std::uintptr_t>(to) % sizeof(__m128i), size);
    std::memcpy(to, from, head);
    to += head;
    from += head;
    size -= head;
    constexpr std::size_t kLine = 4;  // vectors
    for (; size >= kLine * sizeof(__m128i); size -= kLine * sizeof(__m128i)) {
        __m128i line[kLine];
        for (std::size_t i = 0; i < kLine; ++i) line[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
        for (std::size_t i = 0; i < kLine; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, line[i]);
        to += sizeof line;
        from += sizeof line;
    }
    _mm_sfence();  // streaming stores are not ordered with whatever will say that the copy is done
#endif
    std::memcpy(to, from, size);
}

// What a thread takes at a time: long enough to be worth an atomic operation, short enough that neither waits for the other long.
constexpr std::uint64_t kPieceBytes = 512 << 10;
// To start a thread takes as long as copying half a MiB; where the other cores have something to do, this is all that comes of it.
constexpr std::uint64_t kBytesPerThread = 16 * kPieceBytes;
constexpr std::size_t kMostCopyThreads = 8;  // a few saturate the memory of a socket, and others want some of it

// Where a piece begins: `skip` bytes into a range.
struct Place {
    std::size_t range;
    std::uint64_t skip;
};

std::vector<Place> cut(std::span<const std::uint64_t> sizes) {
    std::vector<Place> pieces;
    std::uint64_t until_next = 0;  // bytes
    for (std::size_t range = 0; range < sizes.size(); ++range) {
        std::uint64_t skip = until_next;
        for (; skip < sizes[range]; skip += kPieceBytes) pieces.push_back({range, skip});
        until_next = skip - sizes[range];
    }
    return pieces;
}

}  // namespace

void copy_past_cache(std::byte* to, const std::byte* from, std::size_t size) noexcept {
    if (size >= kWorthStreaming) stream(to, from, size);
    else std::memcpy(to, from, size);
}

std::size_t copy_threads(std::uint64_t bytes, std::size_t processors) noexcept {
    const auto worth = static_cast<std::size_t>(std::min<std::uint64_t>(bytes / kBytesPerThread, kMostCopyThreads));
    return std::max<std::size_t>(std::min(worth, processors), 1);
}

void copy_many(std::span<const std::uint64_t> to, std::span<const std::uint64_t> from, std::span<const std::uint64_t> sizes) {
    const std::vector<Place> pieces = cut(sizes);
    const bool much = pieces.size() > 1;
    std::atomic<std::size_t> next = 0;
    const auto work = [&] {
        for (std::size_t taken = next++; taken < pieces.size(); taken = next++) {
            auto [range, skip] = pieces[taken];
            for (std::uint64_t left = kPieceBytes; left > 0 && range < sizes.size(); ++range, skip = 0) {
                const std::uint64_t size = std::min(left, sizes[range] - skip);
                if (size == 0) continue;  // its addresses may be anything
                const auto target = reinterpret_cast<std::byte*>(to[range] + skip);
                const auto source = reinterpret_cast<const std::byte*>(from[range] + skip);
                if (much && size >= kLeastStreamed) stream(target, source, size);
                else std::memcpy(target, source, size);
                left -= size;
            }
        }
    };
    const std::uint64_t total = std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{0});
    // Asked each time: it is a matter of a microsecond, and the process may be moved to other processors.
    const std::size_t threads = total < 2 * kBytesPerThread ? 1 : copy_threads(total, allowed_processors().size());
    std::array<std::thread, kMostCopyThreads - 1> helpers;
    try {
        for (std::size_t i = 0; i + 1 < threads; ++i) helpers[i] = start_thread(work);
    } catch (const std::exception&) {
        // There are as many threads as the system allows: these do it all.
    }
    work();
    for (std::thread& helper : helpers)
        if (helper.joinable()) helper.join();
}

}  // namespace deepnvme
