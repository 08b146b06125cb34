// Where the rows of a table are: on which volume, and where in its file. Nothing here touches a file.
//
// A record is what belongs to a row: its values, and the optimizer's states of it. A table that is trained has two versions of each
// record side by side, so that a commit never overwrites what the one before it has committed. A version begins with a header.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <iterator>
#include <vector>

namespace deepnvme::tables {

// In front of each version of a record, if there are two.
struct VersionHeader {
    std::uint64_t epoch;  // the commit that it belongs to; 0 for a version that was never written
};

// Consecutive rows in one file, of a table that was divided into parts of any number of rows each.
struct Shard {
    std::uint64_t first_row;
    std::uint64_t base;    // bytes from the start of the file to the shard's first record
    std::uint64_t volume;  // number of the file, which may have several shards
};

// Where a record begins. Ascending as a drive reads it.
struct Start {
    std::uint64_t volume;
    std::uint64_t offset;  // bytes from the start of the volume's file to the record, or to the first of its two versions

    friend auto operator<=>(const Start&, const Start&) = default;
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

    std::vector<Shard> shards;    // in the order of rows; empty if rows are striped. Replaces base and chunk

    bool versioned() const noexcept { return version_bytes != 0; }

    Start start_of(std::uint64_t row) const noexcept {
        if (shards.empty()) return {volumes == 1 ? 0 : row / chunk % volumes, base + place_of(row) * stride};
        const Shard& shard = *std::prev(std::upper_bound(
            shards.begin(), shards.end(), row, [](std::uint64_t wanted, const Shard& each) { return wanted < each.first_row; }));
        return {shard.volume, shard.base + (row - shard.first_row) * stride};
    }
    // The number of the row among those of its volume. Only of striped rows.
    std::uint64_t place_of(std::uint64_t row) const noexcept {
        return volumes == 1 ? row : row / (chunk * volumes) * chunk + row % chunk;
    }
    // Bytes of the file that a row's record takes, with both versions.
    std::uint64_t extent_bytes() const noexcept { return versioned() ? 2 * version_bytes : record_bytes; }
};

}  // namespace deepnvme::tables
