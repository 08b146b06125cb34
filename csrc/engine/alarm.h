// Calls a function at a time asked for. A worker that is to try something again must not sleep until then, and Backend::reap(),
// in which it blocks, has no timeout.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace deepnvme {

// Thread-safe. Its thread is started when first needed.
class Alarm {
public:
    using Clock = std::chrono::steady_clock;

    explicit Alarm(std::function<void()> callback);
    // Waits for a call that has begun, and makes no further one.
    ~Alarm();

    // Have the callback called at this time, from the alarm's thread. Of several times only the earliest is kept, until its call.
    // Does not block, unless no thread can be started: then it sleeps until `time` and calls the callback itself.
    void set(Clock::time_point time) noexcept;

private:
    static constexpr auto kNever = Clock::time_point::max();

    void serve() noexcept;

    const std::function<void()> callback_;
    std::mutex mutex_;  // guards everything below
    std::condition_variable changed_;
    Clock::time_point time_ = kNever;
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace deepnvme
