// Conversions between float32, bfloat16, half and int8, sixteen values at a time, in the compiler's portable vectors: whoever inlines
// this says for which instruction set.
//
// Values of even and of odd places are kept apart: a pair of 16-bit numbers then goes into a lane of 32 bits, and comes out, by shifts
// alone. Nothing here may be contracted to fused operations, which round once where the formula rounds twice: -ffp-contract=off.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "quantization/quantization.h"

// Vectors are only ever passed to what is inlined. Without push and pop: GCC warns where it comes to the end of the whole source.
#pragma GCC diagnostic ignored "-Wpsabi"
#define DEEPNVME_INLINE [[gnu::always_inline]] inline

namespace deepnvme {

using Floats [[gnu::vector_size(32)]] = float;
using Words [[gnu::vector_size(32)]] = std::uint32_t;
using Integers [[gnu::vector_size(32)]] = std::int32_t;
using Shorts [[gnu::vector_size(32)]] = std::int16_t;
using Bytes [[gnu::vector_size(16)]] = std::int8_t;

constexpr std::uint64_t kWidth = 16;

struct Sixteen {
    Floats even, odd;
};

struct Halves {
    std::uint64_t first, second;
};

template <class To, class From>
DEEPNVME_INLINE To bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class Value>
DEEPNVME_INLINE Value load(const std::byte* from) {
    Value value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class Value>
DEEPNVME_INLINE void store(const Value& value, std::byte* to) {
    std::memcpy(to, &value, sizeof value);
}

DEEPNVME_INLINE Words choose(const Words& mask, const Words& yes, const Words& no) { return (mask & yes) | (~mask & no); }

// ---- the types of values: to float32, exactly, and from it, to the nearest and to even between two

struct Float32 {
    static constexpr std::size_t kSize = 4;
    DEEPNVME_INLINE static Sixteen unpack(const std::byte* from) {
        Sixteen values;
        for (std::size_t i = 0; i < 8; ++i) {
            values.even[i] = load<float>(from + 8 * i);
            values.odd[i] = load<float>(from + 8 * i + 4);
        }
        return values;
    }
    DEEPNVME_INLINE static void pack(const Sixteen& values, std::byte* to) {
        for (std::size_t i = 0; i < 8; ++i) {
            store<float>(values.even[i], to + 8 * i);
            store<float>(values.odd[i], to + 8 * i + 4);
        }
    }
};

struct BFloat16 {
    static constexpr std::size_t kSize = 2;
    DEEPNVME_INLINE static Sixteen unpack(const std::byte* from) {
        const auto pairs = load<Words>(from);
        return {bits<Floats>(pairs << 16), bits<Floats>(pairs & 0xffff0000u)};
    }
    // The 16 upper bits are the result.
    DEEPNVME_INLINE static Words rounded(const Floats& values) {
        const auto words = bits<Words>(values);
        return words + 0x7fffu + ((words >> 16) & 1u);
    }
    DEEPNVME_INLINE static void pack(const Sixteen& values, std::byte* to) {
        store<Words>((rounded(values.even) >> 16) | (rounded(values.odd) & 0xffff0000u), to);
    }
};

struct Float16 {
    static constexpr std::size_t kSize = 2;
    DEEPNVME_INLINE static Floats widened(const Words& halves) {
        const Words magnitude = (halves & 0x7fffu) << 13;
        const Words special = (halves & 0x7c00u) == 0x7c00u;
        // Exponents differ by 112 in their bias. Scaled by a number of float32's, subnormal ones become normal ones.
        const auto finite = bits<Words>(bits<Floats>(magnitude) * 0x1p112f);
        return bits<Floats>(choose(special, magnitude | 0x7f800000u, finite) | ((halves & 0x8000u) << 16));
    }
    DEEPNVME_INLINE static Sixteen unpack(const std::byte* from) {
        const auto pairs = load<Words>(from);
        return {widened(pairs & 0xffffu), widened(pairs >> 16)};
    }
    DEEPNVME_INLINE static Words rounded(const Floats& values) {
        const auto words = bits<Words>(values);
        const Words magnitude = words & 0x7fffffffu;
        const Words normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        // The sum's last bit is worth what the last bit of a subnormal half is.
        const Words subnormal = bits<Words>(bits<Floats>(magnitude) + 0.5f) - 0x3f000000u;
        const Words overflow = magnitude >= 0x477ff000u;
        const Words tiny = magnitude < 0x38800000u;
        const Words not_a_number = (magnitude > 0x7f800000u) & 0x200u;
        return choose(overflow, not_a_number | 0x7c00u, choose(tiny, subnormal, normal)) | ((words >> 16) & 0x8000u);
    }
    DEEPNVME_INLINE static void pack(const Sixteen& values, std::byte* to) {
        store<Words>(rounded(values.even) | (rounded(values.odd) << 16), to);
    }
};

// A part of sixteen: what is behind it is neither read nor written.
template <class Type>
DEEPNVME_INLINE Sixteen unpack_part(const std::byte* from, std::uint64_t count) {
    std::byte whole[kWidth * Type::kSize] = {};
    std::memcpy(whole, from, count * Type::kSize);
    return Type::unpack(whole);
}

template <class Type>
DEEPNVME_INLINE void pack_part(const Sixteen& values, std::byte* to, std::uint64_t count) {
    std::byte whole[kWidth * Type::kSize];
    Type::pack(values, whole);
    std::memcpy(to, whole, count * Type::kSize);
}

DEEPNVME_INLINE Bytes load_part(const std::byte* from, std::uint64_t count) {
    std::byte whole[kWidth] = {};
    std::memcpy(whole, from, count);
    return load<Bytes>(whole);
}

DEEPNVME_INLINE void store_part(const Bytes& codes, std::byte* to, std::uint64_t count) {
    std::byte whole[kWidth];
    store(codes, whole);
    std::memcpy(to, whole, count);
}

// ---- codes

DEEPNVME_INLINE Sixteen floats_of(const Bytes& codes) {
    const auto wide = bits<Integers>(__builtin_convertvector(codes, Shorts));
    return {__builtin_convertvector((wide << 16) >> 16, Floats), __builtin_convertvector(wide >> 16, Floats)};
}

// Of e4m3fn: 4 bits of exponent, 3 of mantissa, no infinity. No step has a subnormal float32, which a thread may be set to flush.
DEEPNVME_INLINE Floats fp8_values(const Words& codes) {
    const Words magnitude = codes & 0x7fu, normal = (magnitude << 20) + 0x3c000000u;
    const auto subnormal = bits<Words>(bits<Floats>((magnitude << 20) + 0x3c800000u) - 0x1p-6f);
    const Words finite = choose(magnitude < 8u, subnormal, normal);
    return bits<Floats>(choose(magnitude == 0x7fu, Words{} + 0x7fc00000u, finite) | ((codes & 0x80u) << 24));
}

// Of sixteen codes, almost always all are normal numbers: then exponent and mantissa only move, which takes half the time.
DEEPNVME_INLINE Sixteen floats_of_fp8(const Bytes& codes) {
    const auto special = bits<Halves>(((codes & 0x78) == 0) | ((codes & 0x7f) == 0x7f));
    const auto wide = bits<Integers>(__builtin_convertvector(codes, Shorts));
    if ((special.first | special.second) != 0) [[unlikely]] return {fp8_values(bits<Words>(wide)), fp8_values(bits<Words>(wide) >> 16)};
    const auto normal = [](const Integers& at_the_top) __attribute__((always_inline)) {
        return bits<Floats>(((at_the_top >> 4) & static_cast<std::int32_t>(0x87f00000)) + 0x3c000000);
    };
    return {normal(wide << 24), normal(wide << 8)};
}

// To the nearest integer, to even between two, of numbers below 2**22.
DEEPNVME_INLINE Integers nearest(const Floats& values) {
    constexpr float kShift = 0x1.8p23f;
    return __builtin_convertvector((values + kShift) - kShift, Integers);
}

DEEPNVME_INLINE Floats clamped(const Floats& values, float low, float high) {
    const Floats raised = values < low ? Floats{} + low : values;
    return raised > high ? Floats{} + high : raised;
}

// values / scale, within the bounds.
DEEPNVME_INLINE Bytes codes_of(const Sixteen& values, float scale, float low, float high) {
    const auto even = bits<Words>(nearest(clamped(values.even / scale, low, high)));
    const auto odd = bits<Words>(nearest(clamped(values.odd / scale, low, high)));
    return __builtin_convertvector(bits<Shorts>((even & 0xffffu) | (odd << 16)), Bytes);
}

}  // namespace deepnvme
