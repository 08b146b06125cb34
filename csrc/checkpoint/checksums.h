// The CRC-32s of a zip archive's records, computed while its bytes pass by on their way to the drive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace deepnvme {

// Where a record is in the file, and the two places that have its CRC-32, four bytes each: behind its data, and in the directory.
struct ChecksummedRecord {
    std::uint64_t begin;
    std::uint64_t size;  // at least 1
    std::uint64_t descriptor_crc;
    std::uint64_t directory_crc;
};

// Sees the bytes of the file once, in its order. Not thread-safe.
class Checksums {
public:
    // `records`: in the order of the file; what is between them is not looked at. Directory entries are in the same order, behind
    // all data. Throws std::invalid_argument for others.
    explicit Checksums(std::vector<ChecksummedRecord> records);

    // The next bytes of the file, from `begin` on, are at `memory`: adds to the CRC-32s what they have of data, and writes into
    // them those that belong there and are complete. Memory with data only is read and not written to. Throws
    // std::invalid_argument if `begin` is not where the last ones ended, and then has changed nothing.
    void advance(std::uint64_t begin, std::byte* memory, std::size_t size);

private:
    // Writes what [begin, begin + size) has of the four bytes at `field`. A field may be cut by the end of a chunk.
    static void put(std::uint32_t crc, std::uint64_t field, std::uint64_t begin, std::byte* memory, std::size_t size) noexcept;

    std::vector<ChecksummedRecord> records_;
    std::vector<std::uint32_t> crcs_;
    std::uint64_t position_ = 0;
    std::size_t summed_ = 0;     // the first record whose data have not all passed by
    std::size_t described_ = 0;  // the first whose descriptor has not wholly passed by
    std::size_t listed_ = 0;     // the first whose directory entry has not
};

}  // namespace deepnvme
