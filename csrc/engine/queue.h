// The requests of a drive that still have blocks to start, and the workers that wait for some.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <span>
#include <vector>

#include "engine/backend.h"
#include "engine/request.h"

namespace deepnvme {

// A piece of a request, as a worker gets it.
struct Block {
    Request* request;      // alive until the worker has ended this block
    std::byte* memory;     // the caller's
    std::uint64_t offset;  // bytes into the file
    std::uint32_t length;  // bytes
    Route route;
    std::size_t piece = 0;  // of a request of many: one of those that the block belongs to, or one shortly before
};

// Thread-safe. Requests are cut in the order they came, block by block and only as blocks are taken, so that a request costs the
// same memory whatever its size, many small ones fill a worker as well as one large one, and several workers share either.
class Queue {
public:
    // `workers`: the most that will take from it.
    explicit Queue(std::size_t workers) : workers_(workers) { sleepers_.reserve(workers); }

    // The request has a plan with at least one span, or is an fsync.
    void push(Request& request) noexcept { push(std::array{&request}); }
    void push(std::span<Request* const> requests) noexcept;
    // Before every request that no worker has begun.
    void push_early(Request& request) noexcept;

    // Fill `blocks`, until they have as many bytes, at least 1, and at most up to one staged block (the copy is work that idle
    // workers should share). When there is nothing to take, zero is returned and the next push or stop wakes `sleeper`.
    std::size_t take(std::span<Block> blocks, std::uint64_t bytes, Backend& sleeper) noexcept;

    // Hand out no more of a request. True if it still had blocks to hand out; their outstanding count is the caller's then.
    bool remove(Request& request) noexcept;

    // Have another worker take a block, which this one has not begun and is about to leave() behind. False, and nothing is done,
    // if there is no other, or no memory.
    bool give_back(const Block& block) noexcept;
    // A worker takes no more. True for the last: it has to end what is left and what comes.
    bool leave() noexcept;

    // No sleeper sleeps on, and takers find it stopped().
    void stop() noexcept;
    bool stopped() const noexcept { return stopped_.load(std::memory_order_acquire); }

private:
    void insert_before(Request* next, Request& request) noexcept;
    void unlink(Request& request) noexcept;
    void wake(std::size_t most) noexcept;

    std::mutex mutex_;  // guards everything below, and the cutting state of the requests in it
    Request* first_ = nullptr;
    Request* last_ = nullptr;
    std::size_t workers_;  // that take from it
    std::vector<Backend*> sleepers_;
    std::vector<Block> given_back_;  // taken before the requests
    std::atomic<bool> stopped_{false};
};

}  // namespace deepnvme
