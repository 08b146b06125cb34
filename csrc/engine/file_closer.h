// Closes the files of ended requests away from the threads that keep drives busy: close() takes as long as a small transfer, and
// on NFS and FUSE it sends what the page cache holds.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>

namespace deepnvme {

class Request;

// Thread-safe. The thread is started when first needed.
class FileCloser {
public:
    // `end`: closes the file of a request and ends it; called on the thread.
    explicit FileCloser(std::function<void(Request&)> end);
    ~FileCloser() { stop(); }

    // Have the thread end the request, in the order taken. False, and nothing is done, if there is none to be had: then the
    // caller has to.
    bool take(Request& request) noexcept;
    // The same, but the thread may sleep on until wake(), which the caller has to call soon.
    bool take_quietly(Request& request) noexcept;
    void wake() noexcept;
    // Whether it has so many requests to end that others should rather end theirs themselves, if they can.
    bool behind() const noexcept { return count_.load(std::memory_order_relaxed) >= kEnough; }

    // Wait until every request taken has been ended, then end the thread. Another is started if there is need again.
    void stop() noexcept;

private:
    static constexpr std::size_t kEnough = 64;

    bool append(Request& request) noexcept;
    void serve() noexcept;

    const std::function<void(Request&)> end_;
    std::mutex mutex_;  // guards everything below
    std::condition_variable changed_;
    Request* first_ = nullptr;  // taken, linked by next_
    Request* last_ = nullptr;
    std::atomic<std::size_t> count_{0};
    bool asleep_ = false;
    bool stopping_ = false;
    bool no_thread_ = false;  // to be had: not asked for again
    std::thread thread_;
};

}  // namespace deepnvme
