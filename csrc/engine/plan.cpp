#include "engine/plan.h"

#include <algorithm>

namespace deepnvme {

namespace {

constexpr std::uint64_t round_down(std::uint64_t value, std::uint64_t unit) { return value / unit * unit; }

}  // namespace

Plan plan(const Transfer& transfer, const std::optional<DirectLimits>& direct, const BlockLimits& limits) {
    Plan plan;
    const auto add = [&plan](std::uint64_t begin, std::uint64_t end, std::uint32_t stride, Route route) {
        if (begin < end) plan.spans[plan.count++] = Span{begin, end, stride, route};
    };
    const std::uint64_t end = transfer.offset + transfer.length;
    const std::uint32_t through_cache = transfer.on_device ? std::min(limits.block_size, limits.staging_size) : limits.block_size;
    if (!direct) {
        add(transfer.offset, end, through_cache, Route::buffered);
        return plan;
    }

    // A block's length is a multiple of both alignments, so that the next block's memory is aligned if this one's is.
    const std::uint32_t unit = std::max(direct->memory_alignment, direct->offset_alignment);
    // Sectors larger than a page could reach into another tensor's page: then the end goes through the page cache.
    const bool owns_last_page = transfer.ownership == Ownership::pages && transfer.offset % limits.page_size == 0 && unit <= limits.page_size &&
                                limits.page_size <= limits.staging_size;
    const std::uint32_t sector = direct->offset_alignment;
    const bool whole_sectors = transfer.ownership == Ownership::sectors && transfer.offset % sector == 0 && end % sector == 0;
    const std::uint32_t border = owns_last_page  ? limits.page_size
                                 : whole_sectors ? sector
                                                 : std::max({limits.page_size, sector, direct->cache_granule});
    const std::uint64_t body_end = round_down(end, border);
    const std::uint64_t body_begin = round_down(transfer.offset + border - 1, border);
    const bool aligned = !transfer.on_device && (transfer.address + (body_begin - transfer.offset)) % direct->memory_alignment == 0;
    if ((body_begin >= body_end && !owns_last_page) || (!aligned && !transfer.gds && unit > limits.staging_size)) {
        add(transfer.offset, end, through_cache, Route::buffered);
        return plan;
    }
    const Route body = transfer.gds ? Route::gds : aligned ? Route::zero_copy : Route::staged;
    const std::uint32_t most = body != Route::staged ? limits.block_size : std::min(limits.block_size, limits.staging_size);
    const auto stride = static_cast<std::uint32_t>(std::max<std::uint64_t>(round_down(most, unit), unit));

    add(transfer.offset, body_begin, through_cache, Route::buffered);
    add(body_begin, body_end, stride, body);
    if (owns_last_page) add(body_end, end, limits.page_size, Route::padded);
    else add(body_end, end, through_cache, Route::buffered);
    return plan;
}

}  // namespace deepnvme
