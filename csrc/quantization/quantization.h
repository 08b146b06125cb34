// Weights of a few bits: what deepnvme/model/quantization.py and fp8.py define by a formula, bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace deepnvme {

enum class Scheme : std::uint8_t {
    int8,  // a float32 scale for each row, then a byte for each value
    int4,  // a bfloat16 scale and minimum for each group of a row, then half a byte for each value
    fp8,   // e4m3fn, as checkpoints have it: a float32 scale for each block of a grid. Only read
};
enum class FloatType : std::uint8_t { float32, float16, bfloat16 };

constexpr std::uint64_t kGroup = 128;  // values of int4; the last of a row may be shorter

// A row-major matrix, and the same quantised. Only the values need be aligned, to their own size.
struct Matrix {
    Scheme scheme;
    FloatType type;
    std::uint64_t rows;
    std::uint64_t columns;
    std::byte* values;
    std::byte* scales;
    std::byte* codes;
    std::uint64_t block_rows = 0;     // of fp8: rows and columns that share a scale; the last blocks may be smaller
    std::uint64_t block_columns = 0;
};

constexpr std::uint64_t groups_of(std::uint64_t columns) { return (columns + kGroup - 1) / kGroup; }

// Of a group of int4, of `count` values: byte j has value j in its low half and value j + half_of(count) in its high one.
constexpr std::uint64_t half_of(std::uint64_t count) { return (count + 1) / 2; }

// Bytes of a row's codes, of int8 and int4.
constexpr std::uint64_t row_of_codes(Scheme scheme, std::uint64_t columns) {
    return scheme == Scheme::int8 ? columns : columns / kGroup * (kGroup / 2) + half_of(columns % kGroup);
}
// Bytes of a row's scales, of int8 and int4.
constexpr std::uint64_t row_of_scales(Scheme scheme, std::uint64_t columns) {
    return scheme == Scheme::int8 ? sizeof(float) : groups_of(columns) * 2 * sizeof(std::uint16_t);
}

// Work out the values of all matrices, whose memory does not overlap, with up to `threads` threads: the caller's, and others until this
// returns. Throws std::bad_alloc.
void dequantize(std::span<const Matrix> matrices, unsigned threads);

// Work out scales and codes. Returns a row with a value that is not finite, or above 2**126, where there is one; the rest is then undefined.
std::optional<std::uint64_t> quantize(const Matrix& matrix, unsigned threads);

}  // namespace deepnvme
