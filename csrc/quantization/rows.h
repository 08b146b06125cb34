// Rows of a matrix, there and back, for the instruction set of whoever inlines them.
#pragma once

#include <algorithm>

#include "quantization/vector_conversions.h"

namespace deepnvme {

// Of 2**126, whose difference from its negative is a float32 too.
constexpr std::uint32_t kLargest = 0x7e800000;

template <class Type>
DEEPNVME_INLINE void dequantize_int8(const std::byte* codes, const std::byte* scales, std::byte* values, std::uint64_t count) {
    const float scale = load<float>(scales);
    const auto scaled = [&](const Bytes& taken) __attribute__((always_inline)) {
        const Sixteen found = floats_of(taken);
        return Sixteen{found.even * scale, found.odd * scale};
    };
    std::uint64_t at = 0;
    for (; at + kWidth <= count; at += kWidth) Type::pack(scaled(load<Bytes>(codes + at)), values + at * Type::kSize);
    if (at < count) pack_part<Type>(scaled(load_part(codes + at, count - at)), values + at * Type::kSize, count - at);
}

DEEPNVME_INLINE float widened(std::uint16_t upper) { return bits<float>(static_cast<std::uint32_t>(upper) << 16); }

DEEPNVME_INLINE std::uint16_t rounded(float value) {
    const auto word = bits<std::uint32_t>(value);
    return static_cast<std::uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

template <class Type>
DEEPNVME_INLINE void dequantize_int4(const std::byte* codes, const std::byte* scales, std::byte* values, std::uint64_t count) {
    for (std::uint64_t left = count; left > 0;) {
        const std::uint64_t group = std::min(left, kGroup), half = half_of(group), rest = group - half;
        const float scale = widened(load<std::uint16_t>(scales)), least = widened(load<std::uint16_t>(scales + 2));
        const auto scaled = [&](const Bytes& taken) __attribute__((always_inline)) {
            const Sixteen found = floats_of(taken);
            return Sixteen{found.even * scale + least, found.odd * scale + least};
        };
        std::byte* high = values + half * Type::kSize;
        std::uint64_t at = 0;
        for (; at + kWidth <= rest; at += kWidth) {
            const auto packed = load<Bytes>(codes + at);
            Type::pack(scaled(packed & 15), values + at * Type::kSize);
            Type::pack(scaled((packed >> 4) & 15), high + at * Type::kSize);
        }
        if (at < half) {
            const Bytes packed = load_part(codes + at, half - at);
            pack_part<Type>(scaled(packed & 15), values + at * Type::kSize, half - at);
            pack_part<Type>(scaled((packed >> 4) & 15), high + at * Type::kSize, rest - at);
        }
        codes += half;
        scales += 4;
        values += group * Type::kSize;
        left -= group;
    }
}

// One row. `scales` has one for each `block` values.
template <class Type>
DEEPNVME_INLINE void dequantize_fp8(const std::byte* codes, const std::byte* scales, std::byte* values, std::uint64_t count, std::uint64_t block) {
    for (std::uint64_t left = count; left > 0;) {
        const std::uint64_t group = std::min(left, block);
        const float stored = load<float>(scales);
        // Rounding to 16 bits would carry out of other NaNs.
        const float scale = stored == stored ? stored : bits<float>(std::uint32_t{0x7fc00000});
        const auto scaled = [&](const Bytes& taken) __attribute__((always_inline)) {
            const Sixteen found = floats_of_fp8(taken);
            return Sixteen{found.even * scale, found.odd * scale};
        };
        std::uint64_t at = 0;
        for (; at + kWidth <= group; at += kWidth) Type::pack(scaled(load<Bytes>(codes + at)), values + at * Type::kSize);
        if (at < group) pack_part<Type>(scaled(load_part(codes + at, group - at)), values + at * Type::kSize, group - at);
        codes += group;
        scales += sizeof(float);
        values += group * Type::kSize;
        left -= group;
    }
}

template <class Type>
DEEPNVME_INLINE void dequantize_fp8_rows(const Matrix& matrix, std::uint64_t begin, std::uint64_t end) {
    const std::uint64_t columns = matrix.columns, block = matrix.block_columns;
    const std::uint64_t stride = (columns + block - 1) / block * sizeof(float);
    for (std::uint64_t row = begin; row < end; ++row) {
        const std::byte* scales = matrix.scales + row / matrix.block_rows * stride;
        dequantize_fp8<Type>(matrix.codes + row * columns, scales, matrix.values + row * columns * Type::kSize, columns, block);
    }
}

template <class Type, class Each>
DEEPNVME_INLINE void for_each_sixteen(const std::byte* values, std::uint64_t count, Each each) {
    std::uint64_t at = 0;
    for (; at + kWidth <= count; at += kWidth) each(Type::unpack(values + at * Type::kSize));
    // Once more the last ones, or the first value again: neither the least nor the largest changes.
    if (at < count && at > 0) each(Type::unpack(values + (count - kWidth) * Type::kSize));
    else if (at < count) {
        std::byte whole[kWidth * Type::kSize];
        for (std::uint64_t i = 0; i < kWidth; ++i)
            std::memcpy(whole + i * Type::kSize, values + std::min(i, count - 1) * Type::kSize, Type::kSize);
        each(Type::unpack(whole));
    }
}

// The bits of the largest magnitude: above kLargest for what is not finite, a NaN too.
template <class Type>
DEEPNVME_INLINE std::uint32_t largest_magnitude(const std::byte* values, std::uint64_t count) {
    Words largest{};
    for_each_sixteen<Type>(values, count, [&](const Sixteen& found) __attribute__((always_inline)) {
        const Words even = bits<Words>(found.even) & 0x7fffffffu, odd = bits<Words>(found.odd) & 0x7fffffffu;
        largest = even > largest ? even : largest;
        largest = odd > largest ? odd : largest;
    });
    std::uint32_t result = 0;
    for (int i = 0; i < 8; ++i) result = std::max(result, std::uint32_t{largest[i]});
    return result;
}

struct Bounds {
    float least, most;
};

template <class Type>
DEEPNVME_INLINE Bounds bounds_of(const std::byte* values, std::uint64_t count) {
    Floats least = Floats{} + 0x1p127f, most = Floats{} - 0x1p127f;
    for_each_sixteen<Type>(values, count, [&](const Sixteen& found) __attribute__((always_inline)) {
        least = found.even < least ? found.even : least;
        least = found.odd < least ? found.odd : least;
        most = found.even > most ? found.even : most;
        most = found.odd > most ? found.odd : most;
    });
    Bounds result{least[0], most[0]};
    for (int i = 1; i < 8; ++i) result = {std::min(result.least, float{least[i]}), std::max(result.most, float{most[i]})};
    return result;
}

// False, with nothing done, where a value is not finite or too large.
template <class Type>
DEEPNVME_INLINE bool quantize_int8(const std::byte* values, std::byte* scales, std::byte* codes, std::uint64_t count) {
    const std::uint32_t largest = largest_magnitude<Type>(values, count);
    if (largest > kLargest) return false;
    const float scale = bits<float>(largest) / 127.0f;
    store(scale, scales);
    if (scale == 0) {
        std::memset(codes, 0, count);
        return true;
    }
    std::uint64_t at = 0;
    for (; at + kWidth <= count; at += kWidth) store(codes_of(Type::unpack(values + at * Type::kSize), scale, -127, 127), codes + at);
    if (at < count) {
        const Sixteen last = unpack_part<Type>(values + at * Type::kSize, count - at);
        store_part(codes_of(last, scale, -127, 127), codes + at, count - at);
    }
    return true;
}

template <class Type>
DEEPNVME_INLINE bool quantize_int4(const std::byte* values, std::byte* scales, std::byte* codes, std::uint64_t count) {
    if (largest_magnitude<Type>(values, count) > kLargest) return false;
    for (std::uint64_t left = count; left > 0;) {
        const std::uint64_t group = std::min(left, kGroup), half = half_of(group), rest = group - half;
        const Bounds bounds = bounds_of<Type>(values, group);
        const std::uint16_t stored_scale = rounded((bounds.most - bounds.least) / 15.0f), stored_least = rounded(bounds.least);
        store(stored_scale, scales);
        store(stored_least, scales + 2);
        const float scale = widened(stored_scale), least = widened(stored_least);
        const auto coded = [&](const Sixteen& found) __attribute__((always_inline)) {
            return codes_of({found.even - least, found.odd - least}, scale, 0, 15);
        };
        const std::byte* high = values + half * Type::kSize;
        if (scale == 0) {
            std::memset(codes, 0, half);
        } else {
            std::uint64_t at = 0;
            for (; at + kWidth <= rest; at += kWidth)
                store(coded(Type::unpack(values + at * Type::kSize)) | (coded(Type::unpack(high + at * Type::kSize)) << 4), codes + at);
            if (at < half) {
                const Bytes low_codes = coded(unpack_part<Type>(values + at * Type::kSize, half - at));
                const Bytes high_codes = coded(unpack_part<Type>(high + at * Type::kSize, rest - at));
                store_part(low_codes | (high_codes << 4), codes + at, half - at);
                // Of an odd number of values the last byte has one.
                if (rest < half) codes[half - 1] &= std::byte{15};
            }
        }
        codes += half;
        scales += 4;
        values += group * Type::kSize;
        left -= group;
    }
    return true;
}

template <class Type>
DEEPNVME_INLINE void dequantize_rows(const Matrix& matrix, std::uint64_t begin, std::uint64_t end) {
    if (matrix.scheme == Scheme::fp8) return dequantize_fp8_rows<Type>(matrix, begin, end);
    const std::uint64_t scales = row_of_scales(matrix.scheme, matrix.columns), codes = row_of_codes(matrix.scheme, matrix.columns);
    const std::uint64_t values = matrix.columns * Type::kSize;
    for (std::uint64_t row = begin; row < end; ++row) {
        const auto of = [row](std::byte* first, std::uint64_t size) __attribute__((always_inline)) { return first + row * size; };
        if (matrix.scheme == Scheme::int8)
            dequantize_int8<Type>(of(matrix.codes, codes), of(matrix.scales, scales), of(matrix.values, values), matrix.columns);
        else dequantize_int4<Type>(of(matrix.codes, codes), of(matrix.scales, scales), of(matrix.values, values), matrix.columns);
    }
}

// The first row that was refused, or `end`.
template <class Type>
DEEPNVME_INLINE std::uint64_t quantize_rows(const Matrix& matrix, std::uint64_t begin, std::uint64_t end) {
    const std::uint64_t scales = row_of_scales(matrix.scheme, matrix.columns), codes = row_of_codes(matrix.scheme, matrix.columns);
    const std::uint64_t values = matrix.columns * Type::kSize;
    for (std::uint64_t row = begin; row < end; ++row) {
        const auto of = [row](std::byte* first, std::uint64_t size) __attribute__((always_inline)) { return first + row * size; };
        const bool done = matrix.scheme == Scheme::int8
            ? quantize_int8<Type>(of(matrix.values, values), of(matrix.scales, scales), of(matrix.codes, codes), matrix.columns)
            : quantize_int4<Type>(of(matrix.values, values), of(matrix.scales, scales), of(matrix.codes, codes), matrix.columns);
        if (!done) return row;
    }
    return end;
}

}  // namespace deepnvme
