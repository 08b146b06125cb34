#include "engine/queue.h"

namespace deepnvme {

void Queue::push(Request& request) {
    // Sleepers are woken under the lock: once stop() has had it, nobody is about to wake a backend that is going away.
    std::lock_guard lock(mutex_);
    request.next_ = nullptr;
    (last_ ? last_->next_ : first_) = &request;
    last_ = &request;
    const Span& span = request.plan_.spans[0];
    const bool several_blocks = request.plan_.count > 1 || (request.plan_.count == 1 && span.end - span.begin > span.stride);
    wake(several_blocks ? sleepers_.size() : 1);
}

void Queue::push_early(Request& request) {
    std::lock_guard lock(mutex_);
    // Behind one that has been cut in part: that one has to stay in front, see abandon().
    const bool behind = first_ && first_->cursor_ != first_->offset;
    Request*& before = behind ? first_->next_ : first_;
    request.next_ = before;
    before = &request;
    if (!request.next_) last_ = &request;
    wake(1);
}

void Queue::wake(std::size_t most) {
    for (; most > 0 && !sleepers_.empty(); --most) {
        sleepers_.back()->wake();
        sleepers_.pop_back();
    }
}

std::size_t Queue::take(std::span<Block> blocks, Backend& sleeper) {
    std::lock_guard lock(mutex_);
    std::erase(sleepers_, &sleeper);
    std::size_t count = 0;
    while (first_ && count < blocks.size()) {
        Request& request = *first_;
        if (request.kind == Request::Kind::sync) {
            blocks[count++] = {&request, nullptr, 0, 0, Route::buffered};
            pop_front();
            continue;
        }
        const Span& span = request.plan_.spans[request.span_];
        const std::uint32_t length = block_length(span, request.cursor_);
        blocks[count++] = {&request, request.memory + (request.cursor_ - request.offset), request.cursor_, length, span.route};
        request.cursor_ += length;
        if (request.cursor_ == span.end) ++request.span_;
        // The last block inherits the count that stood for "more to come".
        if (request.span_ == request.plan_.count) pop_front();
        else request.outstanding_.fetch_add(1, std::memory_order_relaxed);
        if (span.route == Route::staged) break;
    }
    if (count == 0 && !stopped()) sleepers_.push_back(&sleeper);
    return count;
}

bool Queue::abandon(Request& request) {
    std::lock_guard lock(mutex_);
    // Only the front request has been cut in part, so only there can a request with a failed block be found.
    if (first_ != &request) return false;
    pop_front();
    return true;
}

void Queue::stop() {
    std::lock_guard lock(mutex_);
    stopped_.store(true, std::memory_order_release);
    wake(sleepers_.size());
}

void Queue::pop_front() {
    first_ = first_->next_;
    if (!first_) last_ = nullptr;
}

}  // namespace deepnvme
