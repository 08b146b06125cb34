// Where the rows of a table are: on which volume, and where in its file. Nothing here touches a file.
//
// A record is what belongs to a row: its values, and the optimizer's states of it. A table that is trained has two versions of each
// record side by side, so that a commit never overwrites what the one before it has committed. A version begins with a header.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

namespace deepnvme::tables {

// In front of each version of a record, if there are two.
struct VersionHeader {
    std::uint64_t epoch;  // the commit that it belongs to; 0 for a version that was never written
};

// Consecutive rows in one file, of a table that was divided into files of any number of rows each.
struct Shard {
    std::uint64_t first_row;
    std::uint64_t base;  // bytes from the start of the file to the shard's first record
};

struct Geometry {
    std::uint64_t rows;
    std::uint64_t record_bytes;   // without header and padding
    std::uint64_t base;           // bytes from the start of each file to its first record
    std::uint64_t stride;         // bytes from one record to the next, with both versions
    std::uint64_t unit;           // bytes that are read as one; units are counted from the start of the file
    std::uint64_t version_bytes;  // of one version with header and padding; 0 if there is only one, without a header
    std::uint64_t volumes = 1;
    std::uint64_t chunk = 1;      // rows that follow one another on a volume before the next volume has its turn

    std::vector<Shard> shards;    // one for each volume, in the order of rows; empty if rows are striped. Replaces base and chunk

    bool versioned() const noexcept { return version_bytes != 0; }

    std::uint64_t volume_of(std::uint64_t row) const noexcept {
        if (!shards.empty()) return static_cast<std::uint64_t>(shard_after(row) - shards.begin()) - 1;
        return volumes == 1 ? 0 : row / chunk % volumes;
    }
    // The number of the row among those of its volume.
    std::uint64_t place_of(std::uint64_t row) const noexcept {
        if (!shards.empty()) return row - std::prev(shard_after(row))->first_row;
        return volumes == 1 ? row : row / (chunk * volumes) * chunk + row % chunk;
    }
    // Bytes from the start of the volume's file to the record, or to the first of its two versions.
    std::uint64_t offset_of(std::uint64_t row) const noexcept {
        return (shards.empty() ? base : std::prev(shard_after(row))->base) + place_of(row) * stride;
    }
    // Bytes of the file that a row's record takes, with both versions.
    std::uint64_t extent_bytes() const noexcept { return versioned() ? 2 * version_bytes : record_bytes; }

private:
    // The first shard whose rows all come after this one. Shards without rows are passed over.
    std::vector<Shard>::const_iterator shard_after(std::uint64_t row) const noexcept {
        return std::upper_bound(shards.begin(), shards.end(), row,
                                [](std::uint64_t wanted, const Shard& shard) { return wanted < shard.first_row; });
    }
};

}  // namespace deepnvme::tables
