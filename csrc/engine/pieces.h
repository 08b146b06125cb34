// What a request of many transfers consists of: pieces of memory, each with its place in one file.
//
// Blocks are planned only as they are handed out. Pieces that follow one another both in the file and in memory are planned as
// one transfer, so that neighbouring rows, or the parts of one large tensor, become large blocks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/plan.h"

namespace deepnvme {

class Request;
struct Block;

struct Piece {
    std::byte* memory;
    std::uint64_t offset;  // bytes into the file
    std::uint64_t length;  // bytes

    std::uint64_t end() const noexcept { return offset + length; }
};

// What plan() needs besides a piece; the same for all of them.
struct PieceLimits {
    std::optional<DirectLimits> direct;
    BlockLimits blocks;
    bool on_device;
    bool gds;
    Ownership ownership;
};

class Pieces {
public:
    // In this order. Throws std::invalid_argument for a range past the largest file offset.
    explicit Pieces(std::vector<Piece> listed);
    // Rows of `record_size` bytes, one after the other in memory: row i has the file's record ids[i], which begins at
    // base + ids[i] * record_size. Throws std::invalid_argument for a number that is negative or too large.
    Pieces(std::byte* memory, std::uint64_t record_size, std::uint64_t base, std::vector<std::int64_t> ids);

    std::size_t count() const noexcept { return count_; }
    Piece operator[](std::size_t index) const noexcept {
        if (record_size_ == 0) return listed_[index];
        return {memory_ + index * record_size_, base_ + static_cast<std::uint64_t>(ids_[index]) * record_size_, record_size_};
    }
    // The blocks it may be cut into, or more. After begin().
    std::size_t most_blocks() const noexcept { return count_ + bytes_ / limits_.blocks.block_size; }
    std::uint64_t bytes() const noexcept { return bytes_; }  // of all pieces together
    // The one that ends last in the file; of several the first. Only if there is one.
    Piece last() const noexcept { return (*this)[last_]; }
    // Whether some piece is likely to hold a whole page of the file, so that there is something to transfer directly.
    bool hold_a_page(std::uint64_t page_size) const noexcept;
    // The parts of the file past `size`, in order, those that touch or overlap put together; as pieces without memory.
    std::vector<Piece> ranges_past(std::uint64_t size) const;

    // Once, before the first cut().
    void begin(const PieceLimits& limits);
    // Fill `blocks`, at most up to one staged block and until they have `bytes`, from which theirs are taken off, while there are
    // more(); return how many. Under the queue's lock.
    std::size_t cut(std::span<Block> blocks, std::uint64_t& bytes, Request& request) noexcept;
    bool more() const noexcept { return span_ < plan_.count; }

    // Any thread. A block belongs to the pieces that it has bytes of.
    void mark_failed(const Block& block) noexcept;
    void mark_all_failed() noexcept;
    bool failed(const Block& block) const noexcept;  // all pieces of the block have
    bool failed(std::size_t index) const noexcept;
    // The first piece that the block has bytes of.
    std::size_t first_of(const Block& block) const noexcept;

private:
    void next_run() noexcept;
    std::size_t end_of(const Block& block, std::size_t first) const noexcept;

    std::vector<Piece> listed_;
    std::vector<std::int64_t> ids_;
    std::byte* memory_ = nullptr;
    std::uint64_t record_size_ = 0;  // 0 for listed pieces
    std::uint64_t base_ = 0;
    std::size_t count_;
    std::uint64_t bytes_ = 0;
    std::size_t last_ = 0;
    PieceLimits limits_{};

    // Cutting; the run is the pieces [run_first_, next_).
    Plan plan_;
    std::uint32_t span_ = 0;
    std::uint64_t cursor_ = 0;
    std::byte* run_memory_ = nullptr;
    std::uint64_t run_begin_ = 0;
    std::size_t run_first_ = 0;
    std::size_t next_ = 0;

    std::vector<std::atomic<std::uint64_t>> failed_;  // a bit for each piece
};

}  // namespace deepnvme
