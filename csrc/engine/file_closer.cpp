#include "engine/file_closer.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "core/threads.h"

namespace deepnvme {

FileCloser::FileCloser(std::function<void(Request&)> end) : end_(std::move(end)) {}

bool FileCloser::take(Request& request) noexcept {
    std::lock_guard lock(mutex_);
    if (no_thread_ || stopping_ || count_ == kCapacity) return false;
    if (!thread_.joinable()) {
        try {
            thread_ = start_thread([this] { serve(); });
        } catch (const std::exception&) {
            no_thread_ = true;
            return false;
        }
    }
    taken_[count_++] = &request;
    // Under the lock: once the thread has the request, it may end, and the engine with it.
    if (std::exchange(asleep_, false)) changed_.notify_one();
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
    Batch batch;
    std::unique_lock lock(mutex_);
    while (true) {
        while (count_ == 0 && !stopping_) {
            asleep_ = true;
            changed_.wait(lock);
        }
        if (count_ == 0) return;
        const std::size_t count = std::exchange(count_, 0);
        std::copy_n(taken_.begin(), count, batch.begin());
        lock.unlock();
        for (std::size_t i = 0; i < count; ++i) end_(*batch[i]);
        lock.lock();
    }
}

}  // namespace deepnvme
