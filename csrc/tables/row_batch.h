// One read of many rows: those in the cache are copied at once, and the others from what is read into staging memory, part by part.
//
//   RowBatch batch(...);      // all numbers are of rows: first_outside() has found none
//   batch.look_up();          // copies what the cache has
//   batch.plan(...);          // the rest, each row once, in the order of the file, as parts with units to read
//   batch.deliver(part, ...)  // once the units of a part are in its staging memory
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tables/geometry.h"
#include "tables/row_cache.h"

namespace deepnvme::tables {

// Which versions of records count: those of the commits up to the last one, and of the present one where the reader is its writer.
struct VisibleEpochs {
    std::uint64_t last = 0;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> abandoned;  // first and last, ascending: were never committed

    bool contains(std::uint64_t epoch) const noexcept;
};

// Where the rows of a batch are to be copied: `width` bytes of each record, from `begin` on, one row after the other.
struct Destination {
    std::byte* memory = nullptr;  // null to have the rows in the cache only
    std::uint64_t begin = 0;
    std::uint64_t width = 0;
};

class RowBatch {
public:
    // Rows of one volume that are read together. Its units are in the order of the file.
    struct Part {
        std::uint64_t volume;
        std::size_t first_row, end_row;    // of the missing rows
        std::size_t first_unit, end_unit;  // of units()
    };

    // The position of the first number that is no row's; empty if all are.
    static std::optional<std::size_t> first_outside(std::span<const std::int64_t> rows, std::uint64_t count) noexcept;

    // Cache and geometry outlive the batch; the destination's memory, until all parts were delivered. All numbers are of rows.
    RowBatch(RowCache& cache, const Geometry& geometry, std::span<const std::int64_t> rows, Destination destination,
             Admission admission);
    ~RowBatch();
    RowBatch(const RowBatch&) = delete;
    RowBatch& operator=(const RowBatch&) = delete;

    // Copy what the cache has. The first call counts uses, if rows are copied at all; a later one, before plan(), finds what has come meanwhile.
    void look_up();
    // Numbers of the other batch's parts, ascending, that have rows which this one misses. The other one has its parts.
    std::vector<std::size_t> awaited_parts(const RowBatch& other) const;
    // Have rows that the other batch reads not be read by this one, which has no destination. Before plan().
    void leave_out(const RowBatch& other);
    // Divide what is missing into parts of at most `part_bytes`, or one row. Up to `gap_bytes` between two rows are read as well, where
    // that makes one read of two.
    void plan(std::uint64_t part_bytes, std::uint64_t gap_bytes);

    std::span<const Part> parts() const noexcept { return parts_; }
    // Numbers of the units to read, as Geometry::unit counts them.
    std::span<const std::int64_t> units(const Part& part) const noexcept {
        return std::span(units_).subspan(part.first_unit, part.end_unit - part.first_unit);
    }
    std::uint64_t numbers() const noexcept { return rows_.size(); }     // that were asked for
    std::uint64_t missing() const noexcept { return missing_.size(); }  // rows, each once
    std::uint64_t hits() const noexcept { return hits_; }               // numbers that the cache had when they were first looked for

    // Copy the rows of a part from the units that were read, and offer them to the cache. `failed`: the indices, ascending, of those of
    // its units that could not be read; their rows are left out, see failed_rows().
    void deliver(std::size_t part, const std::byte* staging, const VisibleEpochs& visible, std::span<const std::uint64_t> failed);
    struct FailedRow {
        std::uint64_t row, volume, offset;
        std::size_t position;  // the first of it among the numbers
    };
    const std::vector<FailedRow>& failed_rows() const noexcept { return failed_; }
    // Whether a row was changed, written and dropped while it was read: what was read of it may be torn, and was not delivered.
    bool stale() const noexcept { return stale_; }
    // The positions of the numbers that are a failed row's.
    std::vector<std::size_t> failed_positions() const;

private:
    struct Wanted {
        Start start;
        std::uint64_t row;
        std::uint32_t position;

        friend auto operator<=>(const Wanted&, const Wanted&) = default;
    };
    struct Missing {
        Start start;
        std::uint64_t row;
        std::size_t first, end;   // of wanted_
        std::uint64_t in_staging = 0;  // bytes from the beginning of its part's memory to the record
    };

    void copy_to(std::uint32_t position, const std::byte* record) noexcept;
    // Rows are in the order of volumes, and of the bytes of their files.
    static bool before(const auto& left, const auto& right) noexcept {
        return left.start != right.start ? left.start < right.start : left.row < right.row;
    }
    void group_missing();

    RowCache& cache_;
    const Geometry& geometry_;
    std::vector<std::int64_t> rows_;
    const Destination destination_;
    const Admission admission_;
    const RowCache::Reading reading_;
    bool looked_up_ = false;
    bool stale_ = false;
    std::uint64_t hits_ = 0;
    std::vector<Wanted> wanted_;     // what is missing: sorted as drives read it, then by position
    std::vector<Missing> missing_;
    std::vector<std::int64_t> units_;
    std::vector<Part> parts_;
    std::vector<FailedRow> failed_;
    std::vector<std::size_t> failed_missing_;
};

}  // namespace deepnvme::tables
