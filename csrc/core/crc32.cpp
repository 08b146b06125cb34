#include "core/crc32.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <exception>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "core/copy.h"
#include "core/numa.h"
#include "core/threads.h"

// A CRC is the remainder of a polynomial over GF(2), whose coefficients are the bits of the message, divided by one of degree 32.
// As zip has it, the bits of each byte are in the order of falling powers from the lowest bit on ("reflected"). So is the remainder:
// bit 31 is the coefficient of x^0. The first 32 bits of the message, and all of the remainder, are inverted.

namespace deepnvme {

namespace {

static_assert(std::endian::native == std::endian::little, "words of the message are read as they lie");

constexpr std::uint32_t kPolynomial = 0xEDB88320;  // without x^32, reflected

// Remainders multiplied, reflected as well.
constexpr std::uint32_t times(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (std::uint32_t power = 0x80000000; power != 0; power >>= 1) {  // x^0, x^1, ...
        if (a & power) product ^= b;
        b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);  // times x
    }
    return product;
}

// The remainder of x^exponent.
constexpr std::uint32_t power_of_x(std::uint64_t exponent) {
    std::uint32_t result = 0x80000000, square = 0x40000000;  // x^0 and x^1
    for (; exponent != 0; exponent >>= 1) {
        if (exponent & 1) result = times(result, square);
        square = times(square, square);
    }
    return result;
}

// By tables: the next 16 bytes at a time. Entry [k][b] is what byte b contributes if k more bytes follow it.
constexpr std::size_t kSlices = 16;

constexpr auto kTables = [] {
    std::array<std::array<std::uint32_t, 256>, kSlices> tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t remainder = byte;
        for (int bit = 0; bit < 8; ++bit) remainder = (remainder >> 1) ^ ((remainder & 1) ? kPolynomial : 0);
        tables[0][byte] = remainder;
    }
    for (std::size_t slice = 1; slice < kSlices; ++slice)
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t before = tables[slice - 1][byte];
            tables[slice][byte] = (before >> 8) ^ tables[0][before & 0xFF];
        }
    return tables;
}();

// These work on remainders that are not inverted.

std::uint32_t by_tables(std::uint32_t remainder, const std::byte* data, std::size_t size) noexcept {
    for (; size >= kSlices; data += kSlices, size -= kSlices) {
        std::array<std::uint8_t, kSlices> block;
        std::memcpy(block.data(), data, kSlices);
        std::uint32_t first;
        std::memcpy(&first, block.data(), sizeof first);
        first ^= remainder;
        std::memcpy(block.data(), &first, sizeof first);
        remainder = 0;
        for (std::size_t i = 0; i < kSlices; ++i) remainder ^= kTables[kSlices - 1 - i][block[i]];
    }
    for (; size > 0; ++data, --size)
        remainder = (remainder >> 8) ^ kTables[0][(remainder ^ std::to_integer<std::uint32_t>(*data)) & 0xFF];
    return remainder;
}

#if defined(__x86_64__)

// By carry-less multiplication: 16 bytes of the message, that is 128 coefficients, are replaced by a product that leaves the same
// remainder and lies where the message goes on, and is added to what is there. In the end 16 bytes are left, for the tables.
//
// In a register bit 0 of the lower half is x^127, and that of the upper x^63. The product of two halves has x^126 in bit 0, which in
// a register stands for x^127: so the factors are one power lower than the distance would have them.
struct Factors {
    std::uint64_t lower, upper;  // for the halves of the register that is carried `bits` further
};

constexpr std::uint64_t in_half(std::uint32_t remainder) { return std::uint64_t{remainder} << 32; }  // bit 63 is x^0

constexpr Factors carried(std::uint64_t bits) { return {in_half(power_of_x(bits + 63)), in_half(power_of_x(bits - 1))}; }

constexpr std::size_t kRegister = sizeof(__m128i);
constexpr std::size_t kRegisters = 4;  // independent of one another, to hide the latency of the multiplication
constexpr Factors kFar = carried(8 * kRegister * kRegisters), kNear = carried(8 * kRegister);

#define DEEPNVME_CLMUL __attribute__((target("pclmul,sse4.1")))

DEEPNVME_CLMUL inline __m128i carry(__m128i value, __m128i factors, __m128i onto) noexcept {
    const __m128i lower = _mm_clmulepi64_si128(value, factors, 0x00), upper = _mm_clmulepi64_si128(value, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(lower, upper), onto);
}

DEEPNVME_CLMUL inline __m128i loaded(const std::byte* data) noexcept {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

DEEPNVME_CLMUL std::uint32_t by_clmul(std::uint32_t remainder, const std::byte* data, std::size_t size) noexcept {
    if (size < kRegisters * kRegister) return by_tables(remainder, data, size);
    const auto factors = [](const Factors& of) {
        return _mm_set_epi64x(static_cast<long long>(of.upper), static_cast<long long>(of.lower));
    };
    const __m128i far = factors(kFar), near = factors(kNear);
    __m128i a = _mm_xor_si128(loaded(data), _mm_cvtsi32_si128(static_cast<int>(remainder)));
    __m128i b = loaded(data + kRegister), c = loaded(data + 2 * kRegister), d = loaded(data + 3 * kRegister);
    constexpr std::size_t kStride = kRegisters * kRegister;
    data += kStride;
    size -= kStride;
    for (; size >= kStride; data += kStride, size -= kStride) {
        a = carry(a, far, loaded(data));
        b = carry(b, far, loaded(data + kRegister));
        c = carry(c, far, loaded(data + 2 * kRegister));
        d = carry(d, far, loaded(data + 3 * kRegister));
    }
    a = carry(carry(carry(a, near, b), near, c), near, d);
    for (; size >= kRegister; data += kRegister, size -= kRegister) a = carry(a, near, loaded(data));
    std::array<std::byte, kRegister> left;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(left.data()), a);
    return by_tables(by_tables(0, left.data(), left.size()), data, size);
}

// The same in registers four times as wide: 29 GB/s from memory rather than 14. What is left in them is a message for the narrow
// ones.
constexpr std::size_t kWideRegister = sizeof(__m512i);
constexpr Factors kWideFar = carried(8 * kWideRegister * kRegisters), kWideNear = carried(8 * kWideRegister);

#define DEEPNVME_WIDE_CLMUL __attribute__((target("avx512f,vpclmulqdq")))

DEEPNVME_WIDE_CLMUL inline __m512i repeated(const Factors& factors) noexcept {
    const auto lower = static_cast<long long>(factors.lower), upper = static_cast<long long>(factors.upper);
    return _mm512_set4_epi64(upper, lower, upper, lower);
}

DEEPNVME_WIDE_CLMUL inline __m512i carry(__m512i value, __m512i factors, __m512i onto) noexcept {
    constexpr int kXorOfThree = 0x96;
    const __m512i lower = _mm512_clmulepi64_epi128(value, factors, 0x00), upper = _mm512_clmulepi64_epi128(value, factors, 0x11);
    return _mm512_ternarylogic_epi64(lower, upper, onto, kXorOfThree);
}

DEEPNVME_WIDE_CLMUL std::uint32_t by_wide_clmul(std::uint32_t remainder, const std::byte* data, std::size_t size) noexcept {
    constexpr std::size_t kStride = kRegisters * kWideRegister;
    if (size < kStride) return by_clmul(remainder, data, size);
    const __m512i far = repeated(kWideFar), near = repeated(kWideNear);
    const __m512i first = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(remainder)));
    __m512i a = _mm512_xor_si512(_mm512_loadu_si512(data), first), b = _mm512_loadu_si512(data + kWideRegister);
    __m512i c = _mm512_loadu_si512(data + 2 * kWideRegister), d = _mm512_loadu_si512(data + 3 * kWideRegister);
    for (data += kStride, size -= kStride; size >= kStride; data += kStride, size -= kStride) {
        a = carry(a, far, _mm512_loadu_si512(data));
        b = carry(b, far, _mm512_loadu_si512(data + kWideRegister));
        c = carry(c, far, _mm512_loadu_si512(data + 2 * kWideRegister));
        d = carry(d, far, _mm512_loadu_si512(data + 3 * kWideRegister));
    }
    std::array<std::byte, kWideRegister> left;
    _mm512_storeu_si512(left.data(), carry(carry(carry(a, near, b), near, c), near, d));
    return by_clmul(by_clmul(0, left.data(), left.size()), data, size);
}

#elif defined(__aarch64__) && defined(__linux__)

// The instructions take 8 bytes, and the result of each is wanted by the next: three runs side by side hide the latency.
constexpr std::size_t kRun = 4096;
constexpr std::uint32_t kPastOneRun = power_of_x(8 * kRun), kPastTwoRuns = power_of_x(16 * kRun);

__attribute__((target("+crc"))) inline std::uint32_t with_word(std::uint32_t remainder, const std::byte* data) noexcept {
    std::uint64_t word;
    std::memcpy(&word, data, sizeof word);
    return __crc32d(remainder, word);
}

__attribute__((target("+crc"))) std::uint32_t by_instructions(std::uint32_t remainder, const std::byte* data, std::size_t size) noexcept {
    for (; size >= 3 * kRun; data += 3 * kRun, size -= 3 * kRun) {
        std::uint32_t second = 0, third = 0;
        for (std::size_t at = 0; at < kRun; at += 8) {
            remainder = with_word(remainder, data + at);
            second = with_word(second, data + kRun + at);
            third = with_word(third, data + 2 * kRun + at);
        }
        remainder = times(remainder, kPastTwoRuns) ^ times(second, kPastOneRun) ^ third;
    }
    for (; size >= 8; data += 8, size -= 8) remainder = with_word(remainder, data);
    return by_tables(remainder, data, size);
}

#endif

struct Method {
    const char* name;
    std::uint32_t (*advance)(std::uint32_t remainder, const std::byte* data, std::size_t size) noexcept;
};

Method best_method() noexcept {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq")) return {"vpclmulqdq", by_wide_clmul};
    if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) return {"pclmulqdq", by_clmul};
#elif defined(__aarch64__) && defined(__linux__)
    if (::getauxval(AT_HWCAP) & HWCAP_CRC32) return {"crc32 instructions", by_instructions};
#endif
    return {"tables", by_tables};
}

const Method& method() noexcept {
    static const Method best = best_method();
    return best;
}

// One thread reads faster than a drive writes, and a few saturate the memory, of which the drives want some. Half of the processors
// are left to the engine's workers and to others.
constexpr std::size_t kMostCrcThreads = 4;
constexpr std::size_t kWorthThreads = 16 << 20;  // bytes: it takes a thread longer to start than to read half a MiB

}  // namespace

std::uint32_t crc32(std::uint32_t crc, const std::byte* data, std::size_t size) noexcept {
    return ~method().advance(~crc, data, size);
}

std::uint32_t crc32_by_tables(std::uint32_t crc, const std::byte* data, std::size_t size) noexcept {
    return ~by_tables(~crc, data, size);
}

std::uint32_t crc32_combined(std::uint32_t first, std::uint32_t second, std::uint64_t size) noexcept {
    return times(first, power_of_x(8 * size)) ^ second;  // the inversions of both cancel out
}

std::uint32_t crc32_by_threads(std::uint32_t crc, const std::byte* data, std::size_t size) {
    if (size < kWorthThreads) return crc32(crc, data, size);
    const std::size_t threads = std::min(copy_threads(size, allowed_processors().size() / 2), kMostCrcThreads);
    const std::size_t share = size / threads;
    std::array<std::uint32_t, kMostCrcThreads> parts{};
    std::array<std::thread, kMostCrcThreads> helpers;
    const auto part = [&](std::size_t i) { parts[i] = crc32(0, data + i * share, i + 1 == threads ? size - i * share : share); };
    std::size_t started = 1;
    try {
        for (; started < threads; ++started) helpers[started] = start_thread([&part, i = started] { part(i); });
    } catch (const std::exception&) {
        // There are as many threads as the system allows: this one does the rest.
    }
    part(0);
    for (std::size_t i = started; i < threads; ++i) part(i);
    for (std::thread& helper : helpers)
        if (helper.joinable()) helper.join();
    for (std::size_t i = 0; i < threads; ++i) crc = crc32_combined(crc, parts[i], i + 1 == threads ? size - i * share : share);
    return crc;
}

const char* crc32_method() noexcept { return method().name; }

}  // namespace deepnvme
