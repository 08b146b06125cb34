#include "engine/pieces.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "engine/queue.h"

namespace deepnvme {

namespace {

constexpr std::uint64_t kLargestOffset = std::numeric_limits<std::int64_t>::max();
constexpr std::size_t kBits = 64;

std::size_t words(std::size_t bits) { return (bits + kBits - 1) / kBits; }

}  // namespace

Pieces::Pieces(std::vector<Piece> listed) : listed_(std::move(listed)), count_(listed_.size()), failed_(words(count_)) {
    for (std::size_t i = 0; i < count_; ++i) {
        const Piece& piece = listed_[i];
        if (piece.offset > kLargestOffset || piece.length > kLargestOffset - piece.offset)
            throw std::invalid_argument("offset " + std::to_string(piece.offset) + " plus " + std::to_string(piece.length) +
                                        " bytes is past the largest file offset");
        bytes_ += piece.length;
        if (piece.end() > listed_[last_].end()) last_ = i;
    }
}

Pieces::Pieces(std::byte* memory, std::uint64_t record_size, std::uint64_t base, std::vector<std::int64_t> ids)
    : ids_(std::move(ids)), memory_(memory), record_size_(record_size), base_(base), count_(ids_.size()), failed_(words(count_)) {
    if (count_ == 0) return;
    if (record_size == 0 || base > kLargestOffset || record_size > kLargestOffset - base)
        throw std::invalid_argument("records of " + std::to_string(record_size) + " bytes from offset " + std::to_string(base) +
                                    " on: there are none within the largest file offset");
    const auto most = static_cast<std::int64_t>((kLargestOffset - base - record_size) / record_size);
    for (std::size_t i = 0; i < count_; ++i) {
        if (ids_[i] < 0 || ids_[i] > most)
            throw std::invalid_argument("ids must be in [0, " + std::to_string(most) + "], got " + std::to_string(ids_[i]) +
                                        " at index " + std::to_string(i));
        if (ids_[i] > ids_[last_]) last_ = i;
    }
    bytes_ = count_ * record_size_;
}

bool Pieces::hold_a_page(std::uint64_t page_size) const noexcept {
    // An estimate, like for small pieces that hold one together: it only decides which descriptor is opened first.
    if (record_size_ > 0) return record_size_ >= page_size;
    return std::any_of(listed_.begin(), listed_.end(), [page_size](const Piece& piece) {
        return (piece.offset + page_size - 1) / page_size * page_size + page_size <= piece.end();
    });
}

std::vector<Piece> Pieces::ranges_past(std::uint64_t size) const {
    std::vector<Piece> ranges;
    const auto add = [&](const Piece& piece) {
        if (piece.length == 0 || piece.end() <= size) return;
        if (!ranges.empty() && piece.offset >= ranges.back().offset && piece.offset <= ranges.back().end())
            ranges.back().length = std::max(ranges.back().end(), piece.end()) - ranges.back().offset;
        else
            ranges.push_back({nullptr, piece.offset, piece.length});
    };
    for (std::size_t i = 0; i < count_; ++i) add((*this)[i]);
    const auto earlier = [](const Piece& left, const Piece& right) { return left.offset < right.offset; };
    if (std::is_sorted(ranges.begin(), ranges.end(), earlier)) return ranges;
    std::sort(ranges.begin(), ranges.end(), earlier);
    for (const Piece& piece : std::exchange(ranges, {})) add(piece);
    return ranges;
}

void Pieces::begin(const PieceLimits& limits) {
    limits_ = limits;
    next_run();
}

// Plan the next pieces that are one transfer, of which there may be none.
void Pieces::next_run() noexcept {
    span_ = plan_.count = 0;
    while (next_ < count_ && plan_.count == 0) {
        run_first_ = next_;
        Piece run = (*this)[next_++];
        if (run.length == 0) continue;
        // Up to where a block ends in any case: the rest is as well planned afterwards.
        const std::uint64_t most = limits_.blocks.block_size - run.offset % limits_.blocks.block_size;
        // Tensors of a device may lie side by side in allocations of their own, which one copy must not span. Rows lie in one tensor.
        const bool may_merge = !limits_.on_device || record_size_ > 0;
        while (may_merge && run.length < most && next_ < count_) {
            const Piece piece = (*this)[next_];
            if (piece.memory != run.memory + run.length || piece.offset != run.end()) break;
            run.length += piece.length;
            ++next_;
        }
        plan_ = plan({run.offset, run.length, reinterpret_cast<std::uintptr_t>(run.memory), limits_.on_device, limits_.gds,
                      limits_.ownership},
                     limits_.direct, limits_.blocks);
        run_memory_ = run.memory;
        run_begin_ = cursor_ = run.offset;
    }
}

std::size_t Pieces::cut(std::span<Block> blocks, std::uint64_t& bytes, Request& request) noexcept {
    std::size_t count = 0;
    while (count < blocks.size() && bytes > 0 && more()) {
        const Span& span = plan_.spans[span_];
        const std::uint32_t length = block_length(span, cursor_);
        const Route route = span.route;
        blocks[count++] = {&request, run_memory_ + (cursor_ - run_begin_), cursor_, length, route, run_first_};
        cursor_ += length;
        bytes -= std::min<std::uint64_t>(length, bytes);
        if (cursor_ == span.end && ++span_ == plan_.count) next_run();
        if (route == Route::staged) break;
    }
    return count;
}

// Within a run each piece begins where the one before it ends, so those of a block lie side by side.
std::size_t Pieces::first_of(const Block& block) const noexcept {
    std::size_t index = block.piece;
    while (index + 1 < count_ && (*this)[index].end() <= block.offset) ++index;
    return index;
}

std::size_t Pieces::end_of(const Block& block, std::size_t first) const noexcept {
    const std::uint64_t end = block.offset + block.length;
    std::size_t index = first + 1;
    while (index < count_ && (*this)[index].offset == (*this)[index - 1].end() && (*this)[index].offset < end) ++index;
    return index;
}

void Pieces::mark_failed(const Block& block) noexcept {
    const std::size_t first = first_of(block);
    const std::size_t end = end_of(block, first);
    for (std::size_t i = first; i < end; ++i)
        failed_[i / kBits].fetch_or(std::uint64_t{1} << i % kBits, std::memory_order_relaxed);
}

void Pieces::mark_all_failed() noexcept {
    for (auto& word : failed_) word.store(~std::uint64_t{0}, std::memory_order_relaxed);
}

bool Pieces::failed(std::size_t index) const noexcept {
    return failed_[index / kBits].load(std::memory_order_relaxed) >> index % kBits & 1;
}

bool Pieces::failed(const Block& block) const noexcept {
    const std::size_t first = first_of(block);
    const std::size_t end = end_of(block, first);
    for (std::size_t i = first; i < end; ++i)
        if (!failed(i)) return false;
    return true;
}

}  // namespace deepnvme
