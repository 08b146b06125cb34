#include "tables/write_batch.h"

#include <algorithm>
#include <cstring>

namespace deepnvme::tables {

WriteBatch::WriteBatch(RowCache& cache, const Geometry& geometry, std::size_t most, std::byte* staging)
    : cache_(cache) {
    parts_.reserve(geometry.volumes);
    records_.reserve(static_cast<std::size_t>(std::min<std::uint64_t>(most, cache.changed())));
    slots_ = cache.take_changed(most);  // from here on nothing throws
    // In the order of the files: neighbours are written together.
    std::sort(slots_.begin(), slots_.end(), [&](auto left, auto right) {
        return geometry.start_of(cache.row_of(left)) < geometry.start_of(cache.row_of(right));
    });
    for (const auto slot : slots_) {
        const std::uint64_t row = cache.row_of(slot), volume = geometry.start_of(row).volume;
        const Stored stored = cache.stored(slot);
        const VersionHeader header{stored.epoch};
        std::memcpy(staging, &header, sizeof(header));
        std::memcpy(staging + sizeof(header), cache.record(slot), geometry.record_bytes);
        const std::uint64_t used = sizeof(header) + geometry.record_bytes;
        std::memset(staging + used, 0, geometry.version_bytes - used);
        staging += geometry.version_bytes;
        if (parts_.empty() || parts_.back().volume != volume) parts_.push_back({volume, records_.size(), records_.size()});
        records_.push_back(static_cast<std::int64_t>(2 * geometry.place_of(row) + stored.version));
        parts_.back().end = records_.size();
    }
}

}  // namespace deepnvme::tables
