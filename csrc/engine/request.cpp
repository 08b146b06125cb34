#include "engine/request.h"

#include <stdexcept>

namespace deepnvme {

void Request::wait() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return done(); });
}

bool Request::wait_for(std::chrono::nanoseconds time) {
    std::unique_lock lock(mutex_);
    return ended_.wait_for(lock, time, [this] { return done(); });
}

void Request::check_process() const {
    if (generation_ != process_generation())
        throw std::runtime_error(describe() + " was started by the parent process, and only there can be waited for");
}

std::optional<IoError> Request::error() const {
    if (!done()) return std::nullopt;
    return error_;  // not written any more
}

void Request::fail(IoError error) {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
    failed_.store(true, std::memory_order_relaxed);
}

std::string Request::describe(Kind kind, std::uint64_t length, std::uint64_t offset) {
    if (kind == Kind::sync) return "fsync";
    return std::string(kind == Kind::read ? "read" : "write") + " of " + std::to_string(length) + " bytes at offset " +
           std::to_string(offset);
}

}  // namespace deepnvme
