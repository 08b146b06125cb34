#include "engine/alarm.h"

#include <exception>
#include <utility>

#include "core/threads.h"

namespace deepnvme {

Alarm::Alarm(std::function<void()> callback) : callback_(std::move(callback)) {}

Alarm::~Alarm() {
    if (!thread_.joinable()) return;
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    changed_.notify_one();
    thread_.join();
}

void Alarm::set(Clock::time_point time) noexcept {
    std::unique_lock lock(mutex_);
    if (time_ <= time) return;
    try {
        if (!thread_.joinable()) thread_ = start_thread([this] { serve(); });
    } catch (const std::exception&) {
        lock.unlock();
        std::this_thread::sleep_until(time);
        return callback_();
    }
    time_ = time;
    changed_.notify_one();
}

void Alarm::serve() noexcept {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
        if (time_ == kNever) {
            changed_.wait(lock);
        } else if (Clock::now() < time_) {
            changed_.wait_until(lock, Clock::time_point(time_));
        } else {
            time_ = kNever;
            lock.unlock();
            callback_();
            lock.lock();
        }
    }
}

}  // namespace deepnvme
