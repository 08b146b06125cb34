// Calls a function at a time asked for: a worker that is to try something again must not sleep until then, and its backend, in
// which it blocks, knows no time.
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

    // `ring`: called on the thread.
    explicit Alarm(std::function<void()> ring);
    ~Alarm();

    // Have it rung then, or earlier if it was asked to before. Does not block, but where there is no thread to be had: then this
    // waits and rings itself.
    void set(Clock::time_point time) noexcept;

private:
    static constexpr auto kNever = Clock::time_point::max();

    void serve() noexcept;

    const std::function<void()> ring_;
    std::mutex mutex_;  // guards everything below
    std::condition_variable changed_;
    Clock::time_point time_ = kNever;
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace deepnvme
