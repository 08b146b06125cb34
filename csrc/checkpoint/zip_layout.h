// Where the records of a zip archive lie, and the headers between them: as torch's writer lays them out, record for record.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace deepnvme {

struct ZipRecord {
    std::string_view name;
    std::uint64_t size;  // of its data, stored as they are
    std::uint32_t crc32;
};

// Where the data of a record begin in the file, and its CRC-32 behind them and in the directory: 4 bytes each.
struct ZipPlaces {
    std::uint64_t data;
    std::uint64_t descriptor_crc;  // where it would be, if the record has no data
    std::uint64_t directory_crc;
};

// The file is, for each record: header_sizes[i] bytes of `text`, padding_sizes[i] of no meaning, and its data, from a multiple of
// the alignment on; then the rest of `text`.
struct ZipLayout {
    std::string text;
    std::vector<std::uint64_t> header_sizes;
    std::vector<std::uint64_t> padding_sizes;
    std::vector<ZipPlaces> places;
};

// What padding can be long: an extra field has 16 bits for its length, and others stand before.
constexpr std::int64_t kMostZipAlignment = 32 << 10;

// Throws std::bad_alloc. `alignment`: at most kMostZipAlignment.
ZipLayout lay_out(std::span<const ZipRecord> records, std::uint64_t alignment);

}  // namespace deepnvme
