// CRC-32 as zip, gzip and PNG have it (zlib's crc32), at the speed of memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deepnvme {

// Extends `crc`, the CRC-32 of the preceding bytes (0 for none), by `size` bytes at `data`.
std::uint32_t crc32(std::uint32_t crc, const std::byte* data, std::size_t size) noexcept;

// The CRC-32 of two ranges in a row: `first` of the one, `second` of the other, which has `size` bytes.
std::uint32_t crc32_combined(std::uint32_t first, std::uint32_t second, std::uint64_t size) noexcept;

// As crc32(); where there are many bytes, other threads help until this returns, so that it keeps up with several drives.
std::uint32_t crc32_by_threads(std::uint32_t crc, const std::byte* data, std::size_t size);

// How this processor computes it: "vpclmulqdq", "pclmulqdq", "crc32 instructions" or "tables".
const char* crc32_method() noexcept;

// As crc32(), by tables whatever the processor has: for tests.
std::uint32_t crc32_by_tables(std::uint32_t crc, const std::byte* data, std::size_t size) noexcept;

}  // namespace deepnvme
