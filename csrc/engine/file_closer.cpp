#include "engine/file_closer.h"

#include <exception>
#include <utility>

#include "core/threads.h"
#include "engine/request.h"

namespace deepnvme {

FileCloser::FileCloser(std::function<void(Request&)> end) : end_(std::move(end)) {}

bool FileCloser::take(Request& request) noexcept {
    std::lock_guard lock(mutex_);
    if (!append(request)) return false;
    // Under the lock: once the thread has the request, it may end, and the engine with it.
    if (std::exchange(asleep_, false)) changed_.notify_one();
    return true;
}

bool FileCloser::take_quietly(Request& request) noexcept {
    std::lock_guard lock(mutex_);
    return append(request);
}

void FileCloser::wake() noexcept {
    {
        std::lock_guard lock(mutex_);
        if (!first_ || !std::exchange(asleep_, false)) return;
    }
    changed_.notify_one();
}

bool FileCloser::append(Request& request) noexcept {
    if (no_thread_ || stopping_) return false;
    if (!thread_.joinable()) {
        try {
            thread_ = start_thread([this] { serve(); });
        } catch (const std::exception&) {
            no_thread_ = true;
            return false;
        }
    }
    request.next_ = nullptr;
    (first_ ? last_->next_ : first_) = &request;
    last_ = &request;
    count_.fetch_add(1, std::memory_order_relaxed);
    return true;
}

void FileCloser::stop() noexcept {
    std::thread ending;
    {
        std::lock_guard lock(mutex_);
        ending.swap(thread_);
        if (!ending.joinable()) return;
        stopping_ = true;
        changed_.notify_one();
    }
    ending.join();
    std::lock_guard lock(mutex_);
    stopping_ = false;
}

void FileCloser::serve() noexcept {
    std::unique_lock lock(mutex_);
    while (true) {
        while (!first_ && !stopping_) {
            asleep_ = true;
            changed_.wait(lock);
        }
        if (!first_) return;
        Request* next = std::exchange(first_, nullptr);
        count_.store(0, std::memory_order_relaxed);
        lock.unlock();
        while (next) end_(*std::exchange(next, next->next_));
        lock.lock();
    }
}

}  // namespace deepnvme
