#include "quantization/quantization.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "core/threads.h"
#include "quantization/rows.h"

namespace deepnvme {

namespace {

// Compiled twice where that may be of use: what the processor has is known when it runs.
DEEPNVME_INLINE void dequantize_any(const Matrix& matrix, std::uint64_t begin, std::uint64_t end) {
    switch (matrix.type) {
        case FloatType::float32: return dequantize_rows<Float32>(matrix, begin, end);
        case FloatType::float16: return dequantize_rows<Float16>(matrix, begin, end);
        case FloatType::bfloat16: return dequantize_rows<BFloat16>(matrix, begin, end);
    }
}

DEEPNVME_INLINE std::uint64_t quantize_any(const Matrix& matrix, std::uint64_t begin, std::uint64_t end) {
    switch (matrix.type) {
        case FloatType::float32: return quantize_rows<Float32>(matrix, begin, end);
        case FloatType::float16: return quantize_rows<Float16>(matrix, begin, end);
        case FloatType::bfloat16: return quantize_rows<BFloat16>(matrix, begin, end);
    }
    return end;
}

struct Kernels {
    void (*dequantize)(const Matrix& matrix, std::uint64_t begin, std::uint64_t end);
    std::uint64_t (*quantize)(const Matrix& matrix, std::uint64_t begin, std::uint64_t end);
};

void dequantize_plainly(const Matrix& matrix, std::uint64_t begin, std::uint64_t end) { dequantize_any(matrix, begin, end); }
std::uint64_t quantize_plainly(const Matrix& matrix, std::uint64_t begin, std::uint64_t end) { return quantize_any(matrix, begin, end); }

// Tests are compiled without, where the processor has more.
#if defined(__x86_64__) && !defined(DEEPNVME_PLAIN_KERNELS)
#define DEEPNVME_HAVE_AVX2_KERNELS
[[gnu::target("avx2")]] void dequantize_avx2(const Matrix& matrix, std::uint64_t begin, std::uint64_t end) {
    dequantize_any(matrix, begin, end);
}
[[gnu::target("avx2")]] std::uint64_t quantize_avx2(const Matrix& matrix, std::uint64_t begin, std::uint64_t end) {
    return quantize_any(matrix, begin, end);
}
#endif

Kernels best_kernels() {
#ifdef DEEPNVME_HAVE_AVX2_KERNELS
    if (__builtin_cpu_supports("avx2")) return {dequantize_avx2, quantize_avx2};
#endif
    return {dequantize_plainly, quantize_plainly};
}

// What a thread takes at a time: long enough to be worth an atomic operation, short enough that none waits for another long.
constexpr std::uint64_t kPieceValues = 128 << 10;
constexpr std::size_t kPiecesForAThread = 4;  // which takes as long to start as half a MiB to copy

struct MatrixRows {
    const Matrix* matrix;
    std::uint64_t begin, end;  // rows
};

std::vector<MatrixRows> cut(std::span<const Matrix> matrices) {
    std::vector<MatrixRows> pieces;
    for (const Matrix& matrix : matrices) {
        if (matrix.columns == 0) continue;
        const std::uint64_t rows = std::max<std::uint64_t>(1, kPieceValues / matrix.columns);
        for (std::uint64_t begin = 0; begin < matrix.rows; begin += rows)
            pieces.push_back({&matrix, begin, std::min(begin + rows, matrix.rows)});
    }
    return pieces;
}

template <class Work>
void share(const std::vector<MatrixRows>& pieces, unsigned threads, const Work& work) {
    std::atomic<std::size_t> next = 0;
    const auto take = [&] {
        for (std::size_t taken = next++; taken < pieces.size(); taken = next++) work(pieces[taken]);
    };
    std::vector<std::thread> helpers;
    helpers.reserve(threads);
    try {
        while (helpers.size() + 1 < threads && (helpers.size() + 1) * kPiecesForAThread < pieces.size()) helpers.push_back(start_thread(take));
    } catch (const IoError&) {
        // There are as many threads as the system allows.
    }
    take();
    for (std::thread& helper : helpers) helper.join();
}

}  // namespace

void dequantize(std::span<const Matrix> matrices, unsigned threads) {
    const Kernels kernels = best_kernels();
    share(cut(matrices), threads, [&](const MatrixRows& piece) { kernels.dequantize(*piece.matrix, piece.begin, piece.end); });
}

std::optional<std::uint64_t> quantize(const Matrix& matrix, unsigned threads) {
    const Kernels kernels = best_kernels();
    std::atomic<std::uint64_t> refused = matrix.rows;
    share(cut({&matrix, 1}), threads, [&](const MatrixRows& piece) {
        const std::uint64_t row = kernels.quantize(matrix, piece.begin, piece.end);
        if (row < piece.end) refused = row;
    });
    const std::uint64_t row = refused;
    return row < matrix.rows ? std::optional(row) : std::nullopt;
}

}  // namespace deepnvme
