#include "tables/row_batch.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace deepnvme::tables {

namespace {

// Rows looked for ahead of the one that is copied: their memory is not in the processor's caches.
constexpr std::size_t kAhead = 16;

}  // namespace

bool VisibleEpochs::contains(std::uint64_t epoch) const noexcept {
    if (epoch == 0 || epoch > last) return false;
    if (abandoned.empty() || epoch < abandoned.front().first) return true;
    const auto after = std::upper_bound(abandoned.begin(), abandoned.end(), epoch,
                                        [](std::uint64_t value, const auto& range) { return value < range.first; });
    return epoch > std::prev(after)->second;
}

std::optional<std::size_t> RowBatch::first_outside(std::span<const std::int64_t> rows, std::uint64_t count) noexcept {
    for (std::size_t i = 0; i < rows.size(); ++i)
        if (static_cast<std::uint64_t>(rows[i]) >= count) return i;  // a negative one as well
    return {};
}

RowBatch::RowBatch(RowCache& cache, const Geometry& geometry, std::span<const std::int64_t> rows, Destination destination,
                   Admission admission)
    : cache_(cache),
      geometry_(geometry),
      rows_(rows.begin(), rows.end()),
      destination_(destination),
      admission_(admission),
      reading_(cache.begin_reading()) {}

RowBatch::~RowBatch() { cache_.end_reading(reading_); }

void RowBatch::copy_to(std::uint32_t position, const std::byte* record) noexcept {
    if (destination_.memory)
        std::memcpy(destination_.memory + position * destination_.width, record + destination_.begin, destination_.width);
}

void RowBatch::look_up() {
    const auto find = [&](std::uint64_t row, std::uint32_t position) {
        const auto slot = cache_.find(row);
        if (slot == RowCache::kNone) return false;
        copy_to(position, cache_.record(slot));
        return true;
    };
    if (std::exchange(looked_up_, true)) {
        std::erase_if(wanted_, [&](const Wanted& wanted) { return find(wanted.row, wanted.position); });
    } else {
        // Two looks ahead: first for the entry in the index, then for the record that it leads to.
        for (std::size_t i = 0; i < std::min(2 * kAhead, rows_.size()); ++i) cache_.prefetch(static_cast<std::uint64_t>(rows_[i]));
        for (std::size_t i = 0; i < rows_.size(); ++i) {
            if (i + 2 * kAhead < rows_.size()) cache_.prefetch(static_cast<std::uint64_t>(rows_[i + 2 * kAhead]));
            if (i + kAhead < rows_.size()) {
                const auto slot = cache_.find(static_cast<std::uint64_t>(rows_[i + kAhead]));
                if (slot != RowCache::kNone) cache_.prefetch_record(slot);
            }
            const auto row = static_cast<std::uint64_t>(rows_[i]);
            const auto position = static_cast<std::uint32_t>(i);
            if (destination_.memory) cache_.count_use(row);
            if (!find(row, position)) wanted_.push_back({geometry_.start_of(row), row, position});
        }
        hits_ = rows_.size() - wanted_.size();
    }
    if (!std::ranges::is_sorted(wanted_)) std::ranges::sort(wanted_);
    group_missing();
}

void RowBatch::group_missing() {
    missing_.clear();
    for (std::size_t i = 0; i < wanted_.size(); ++i) {
        if (missing_.empty() || missing_.back().row != wanted_[i].row) missing_.push_back({wanted_[i].start, wanted_[i].row, i, i});
        missing_.back().end = i + 1;
    }
}

std::vector<std::size_t> RowBatch::awaited_parts(const RowBatch& other) const {
    std::vector<std::size_t> parts;
    std::size_t part = 0;
    auto mine = missing_.begin();
    for (std::size_t i = 0; mine != missing_.end() && i < other.missing_.size();) {
        if (mine->row != other.missing_[i].row) {
            if (before(*mine, other.missing_[i])) ++mine;
            else ++i;
            continue;
        }
        while (other.parts_[part].end_row <= i) ++part;
        parts.push_back(part);
        i = other.parts_[part].end_row;
    }
    return parts;
}

void RowBatch::leave_out(const RowBatch& other) {
    auto theirs = other.missing_.begin();
    std::erase_if(wanted_, [&](const Wanted& wanted) {
        while (theirs != other.missing_.end() && before(*theirs, wanted)) ++theirs;
        return theirs != other.missing_.end() && theirs->row == wanted.row;
    });
    group_missing();
}

void RowBatch::plan(std::uint64_t part_bytes, std::uint64_t gap_bytes) {
    const std::uint64_t unit = geometry_.unit;
    for (std::size_t i = 0; i < missing_.size(); ++i) {
        Missing& missing = missing_[i];
        const auto [volume, offset] = missing.start;
        const std::uint64_t first = offset / unit, last = (offset + geometry_.extent_bytes() - 1) / unit;
        std::uint64_t next = first;  // the first unit that is not in the part yet
        bool fits = !parts_.empty() && parts_.back().volume == volume;
        if (fits) {
            const auto newest = static_cast<std::uint64_t>(units_.back());
            if (first <= newest || (first - newest - 1) * unit <= gap_bytes) next = newest + 1;
            const std::uint64_t units = units_.size() - parts_.back().first_unit + (last >= next ? last - next + 1 : 0);
            fits = units * unit <= part_bytes;
        }
        if (!fits) {
            parts_.push_back({volume, i, i, units_.size(), units_.size()});
            next = first;
        }
        for (; next <= last; ++next) units_.push_back(static_cast<std::int64_t>(next));
        Part& part = parts_.back();
        part.end_row = i + 1;
        part.end_unit = units_.size();
        // The part's units from the row's first one on follow one another without a gap.
        const std::uint64_t behind = static_cast<std::uint64_t>(units_.back()) - first + 1;
        missing.in_staging = (part.end_unit - part.first_unit - behind) * unit + offset % unit;
    }
}

void RowBatch::deliver(std::size_t number, const std::byte* staging, const VisibleEpochs& visible,
                       std::span<const std::uint64_t> failed) {
    const Part& part = parts_[number];
    for (std::size_t i = part.first_row; i < part.end_row; ++i) {
        const Missing& missing = missing_[i];
        const std::byte* record = staging + missing.in_staging;
        const std::uint64_t first = missing.in_staging / geometry_.unit,
                            last = (missing.in_staging + geometry_.extent_bytes() - 1) / geometry_.unit;
        const auto broken = std::lower_bound(failed.begin(), failed.end(), first);
        const auto slot = cache_.find(missing.row);
        if (slot != RowCache::kNone) {  // it has come meanwhile, perhaps changed
            for (std::size_t j = missing.first; j < missing.end; ++j) copy_to(wanted_[j].position, cache_.record(slot));
            continue;
        }
        if (broken != failed.end() && *broken <= last) {
            failed_.push_back({missing.row, missing.start.volume, missing.start.offset, wanted_[missing.first].position});
            failed_missing_.push_back(i);
            continue;
        }
        Stored stored;
        if (geometry_.versioned()) {
            if (cache_.changed_since(missing.row, reading_.changes)) {  // and dropped again: the drive has newer
                stale_ = true;
                continue;
            }
            for (std::uint8_t version = 0; version < 2; ++version) {
                VersionHeader header;
                std::memcpy(&header, record + version * geometry_.version_bytes, sizeof(header));
                if (visible.contains(header.epoch) && header.epoch > stored.epoch) stored = {header.epoch, version};
            }
            // A row that was never written, or never committed, has zeros in its second version: the first is written first.
            record += stored.version * geometry_.version_bytes + sizeof(VersionHeader);
        }
        for (std::size_t j = missing.first; j < missing.end; ++j) copy_to(wanted_[j].position, record);
        const auto admitted = cache_.insert(missing.row, stored, admission_);
        if (admitted != RowCache::kNone) std::memcpy(cache_.record(admitted), record, geometry_.record_bytes);
    }
}

std::vector<std::size_t> RowBatch::failed_positions() const {
    std::vector<std::size_t> positions;
    for (const std::size_t i : failed_missing_)
        for (std::size_t j = missing_[i].first; j < missing_[i].end; ++j) positions.push_back(wanted_[j].position);
    std::sort(positions.begin(), positions.end());
    return positions;
}

}  // namespace deepnvme::tables
