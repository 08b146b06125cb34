// The records of a file of blocks: for each slot the key, length and checksum of the block that lies there. docs/formats.md describes them.
//
// Records are written through the page cache, after the block is whole on the drive; what a power cut leaves of them is told by checksums.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/file.h"

namespace deepnvme::kvstore {

inline constexpr std::size_t kMostKeyBytes = 64;

struct Record {
    std::uint32_t crc = 0;        // CRC-32 of the rest of the record
    std::uint32_t block_crc = 0;  // CRC-32 of the key followed by the block
    std::uint32_t length = 0;     // bytes of the block
    std::uint32_t key_length = 0;
    std::uint64_t sequence = 0;  // larger in records that were written later
    char key[kMostKeyBytes] = {};
    std::uint8_t unused[40] = {};

    static Record of(std::string_view key, std::uint32_t length, std::uint32_t block_crc, std::uint64_t sequence) noexcept;
    // Whether the record is undamaged, and its block has at most `most_bytes`.
    bool valid(std::uint64_t most_bytes) const noexcept;
    std::string_view key_text() const noexcept { return {key, key_length}; }
};
static_assert(sizeof(Record) == 128, "a record never crosses a sector");

// Read or write the records that begin at an offset of a file. Records past the end of the file are read as zeros. Throw IoError.
void read_records(File& file, std::uint64_t offset, std::span<Record> records);
void write_records(File& file, std::uint64_t offset, std::span<const Record> records);

}  // namespace deepnvme::kvstore
