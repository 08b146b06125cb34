#include "engine/request.h"

#include <stdexcept>

#include "engine/queue.h"

namespace deepnvme {

void Request::wait() {
    std::unique_lock lock(mutex_);
    if (announce()) ended_.wait(lock, [this] { return done(); });
}

bool Request::wait_for(std::chrono::nanoseconds time) {
    std::unique_lock lock(mutex_);
    return !announce() || ended_.wait_for(lock, time, [this] { return done(); });
}

void Request::check_process() const {
    if (generation_ != process_generation())
        throw std::runtime_error(describe() + " was started by the parent process, and only there can be waited for");
}

std::optional<IoError> Request::error() const {
    if (!done()) return std::nullopt;
    return error_;  // not written any more
}

void Request::fail(const IoError& error) noexcept {
    if (pieces_) pieces_->mark_all_failed();
    note(error);
}

void Request::fail(const Block& block, const IoError& error) noexcept {
    if (pieces_) pieces_->mark_failed(block);
    note(error);
}

void Request::note(const IoError& error) noexcept {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = error;
    failed_.store(true, std::memory_order_relaxed);
}

bool Request::hold() noexcept {
    auto count = outstanding_.load(std::memory_order_relaxed);
    while (count > 0 &&
           !outstanding_.compare_exchange_weak(count, count + 1, std::memory_order_acq_rel, std::memory_order_relaxed)) {}
    return count > 0;
}

void Request::finish() noexcept {
    // The lock is only taken for those who wait: with nobody else at it, it would be a tenth of what a block costs.
    if (!(state_.fetch_or(kDone, std::memory_order_acq_rel) & kWaitedFor)) return;
    { std::lock_guard lock(mutex_); }  // a waiter that has announced itself now waits
    ended_.notify_all();
}

std::string Request::describe() const {
    if (!pieces_) return describe(kind, length, offset);
    return std::string(kind == Kind::read ? "read" : "write") + " of " + std::to_string(length) + " bytes in " +
           std::to_string(pieces_->count()) + " pieces";
}

std::string Request::describe(const Block& block) const {
    if (!pieces_) return describe();
    const Piece piece = (*pieces_)[pieces_->first_of(block)];
    return describe(kind, piece.length, piece.offset);
}

std::string Request::describe(Kind kind, std::uint64_t length, std::uint64_t offset) {
    if (kind == Kind::sync) return "fsync";
    return std::string(kind == Kind::read ? "read" : "write") + " of " + std::to_string(length) + " bytes at offset " +
           std::to_string(offset);
}

}  // namespace deepnvme
