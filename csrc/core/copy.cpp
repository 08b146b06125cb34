#include "core/copy.h"

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace deepnvme {

void copy_past_cache(std::byte* to, const std::byte* from, std::size_t size) noexcept {
#ifdef __SSE2__
    // Whoever asked for less than this may well use it at once, and it displaces little.
    constexpr std::size_t kWorthwhile = 256 << 10;
    if (size >= kWorthwhile) {
        const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % sizeof(__m128i);
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
        _mm_sfence();  // streaming stores are not ordered with the flag that will say the read is done
    }
#endif
    std::memcpy(to, from, size);
}

}  // namespace deepnvme
