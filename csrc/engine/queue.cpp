#include "engine/queue.h"

#include <algorithm>
#include <new>

namespace deepnvme {

namespace {

// Blocks that the plan is cut into, or a few more.
std::size_t blocks_of(const Plan& plan) {
    std::size_t blocks = 0;
    for (std::uint32_t i = 0; i < plan.count; ++i) {
        const Span& span = plan.spans[i];
        blocks += span.end - span.begin <= span.stride ? 1 : (span.end - span.begin) / span.stride + 1;
    }
    return blocks;
}

}  // namespace

void Queue::push(std::span<Request* const> requests) noexcept {
    std::size_t blocks = 0;
    for (const Request* request : requests)
        blocks += std::max<std::size_t>(request->pieces_ ? request->pieces_->most_blocks() : blocks_of(request->plan_), 1);
    // Sleepers are woken under the lock: once stop() has had it, nobody is about to wake a backend that is going away.
    std::lock_guard lock(mutex_);
    for (Request* request : requests) insert_before(nullptr, *request);
    wake(blocks);
}

void Queue::push_early(Request& request) noexcept {
    std::lock_guard lock(mutex_);
    // Behind one that has been cut in part: its other blocks are on their way.
    const bool behind = first_ && first_->cursor_ != first_->offset;
    insert_before(behind ? first_->next_ : first_, request);
    wake(1);
}

void Queue::wake(std::size_t most) noexcept {
    for (; most > 0 && !sleepers_.empty(); --most) {
        sleepers_.back()->wake();
        sleepers_.pop_back();
    }
}

std::size_t Queue::take(std::span<Block> blocks, std::uint64_t bytes, Backend& sleeper) noexcept {
    std::lock_guard lock(mutex_);
    std::erase(sleepers_, &sleeper);
    std::size_t count = 0;
    for (; !given_back_.empty() && count < blocks.size() && bytes > 0; given_back_.pop_back()) {
        blocks[count++] = given_back_.back();
        bytes -= std::min<std::uint64_t>(given_back_.back().length, bytes);
    }
    while (first_ && count < blocks.size() && bytes > 0) {
        Request& request = *first_;
        if (request.kind == Request::Kind::sync) {
            blocks[count++] = {&request, nullptr, 0, 0, Route::buffered};
            unlink(request);
            continue;
        }
        if (request.pieces_) {
            const std::size_t cut = request.pieces_->cut(blocks.subspan(count), bytes, request);
            count += cut;
            // As below, for all of them at once.
            request.outstanding_.fetch_add(cut - (request.pieces_->more() ? 0 : 1), std::memory_order_relaxed);
            if (!request.pieces_->more()) unlink(request);
            if (blocks[count - 1].route == Route::staged) break;
            continue;
        }
        const Span& span = request.plan_.spans[request.span_];
        const std::uint32_t length = block_length(span, request.cursor_);
        blocks[count++] = {&request, request.memory + (request.cursor_ - request.offset), request.cursor_, length, span.route};
        request.cursor_ += length;
        bytes -= std::min<std::uint64_t>(length, bytes);
        if (request.cursor_ == span.end) ++request.span_;
        // The last block inherits the count that stood for "more to come".
        if (request.span_ == request.plan_.count) unlink(request);
        else request.outstanding_.fetch_add(1, std::memory_order_relaxed);
        if (span.route == Route::staged) break;
    }
    if (count == 0 && !stopped()) sleepers_.push_back(&sleeper);
    return count;
}

bool Queue::remove(Request& request) noexcept {
    std::lock_guard lock(mutex_);
    if (!request.queued_) return false;
    unlink(request);
    return true;
}

bool Queue::give_back(const Block& block) noexcept {
    std::lock_guard lock(mutex_);
    if (workers_ == 1) return false;
    try {
        given_back_.push_back(block);
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}

bool Queue::leave() noexcept {
    std::lock_guard lock(mutex_);
    wake(sleepers_.size());  // what was begun goes on with them
    return --workers_ == 0;
}

void Queue::stop() noexcept {
    std::lock_guard lock(mutex_);
    stopped_.store(true, std::memory_order_release);
    wake(sleepers_.size());
}

// Null: at the end.
void Queue::insert_before(Request* next, Request& request) noexcept {
    Request* previous = next ? next->previous_ : last_;
    request.previous_ = previous;
    request.next_ = next;
    request.queued_ = true;
    (previous ? previous->next_ : first_) = &request;
    (next ? next->previous_ : last_) = &request;
}

void Queue::unlink(Request& request) noexcept {
    Request* next = request.next_;
    (request.previous_ ? request.previous_->next_ : first_) = next;
    (next ? next->previous_ : last_) = request.previous_;
    request.queued_ = false;
    if (next) __builtin_prefetch(next);  // taken next: what it is planned to be lies in memory that nothing has touched lately
}

}  // namespace deepnvme
