// Changed rows on their way to the drive: the images of their versions, and where those belong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tables/geometry.h"
#include "tables/row_cache.h"

namespace deepnvme::tables {

class WriteBatch {
public:
    // Versions of one volume.
    struct Part {
        std::uint64_t volume;
        std::size_t first, end;  // of records()
    };

    // Takes up to `most` changed rows of a cache that outlives this, and copies them to `staging`, which has room for as many versions.
    WriteBatch(RowCache& cache, const Geometry& geometry, std::size_t most, std::byte* staging);

    std::span<const Part> parts() const noexcept { return parts_; }
    // Where the versions of a part belong, in the order in which they are in staging: numbers of versions from the start of the file.
    std::span<const std::int64_t> records(const Part& part) const noexcept {
        return std::span(records_).subspan(part.first, part.end - part.first);
    }
    std::size_t rows() const noexcept { return slots_.size(); }
    // Once, when all were written or not.
    void written(bool succeeded) noexcept { cache_.written(slots_, succeeded); }

private:
    RowCache& cache_;
    std::vector<RowCache::Slot> slots_;
    std::vector<std::int64_t> records_;
    std::vector<Part> parts_;
};

}  // namespace deepnvme::tables
