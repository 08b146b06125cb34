// Closes the files of ended requests away from the threads that keep drives busy: close() takes as long as a small transfer, and on
// NFS and FUSE it sends what the page cache holds.
#pragma once

#include <array>
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

    // Have the thread end the request, in the order taken. False, and nothing is done, if it is behind already or there is none: then
    // the caller has to.
    bool take(Request& request) noexcept;

    // Wait until every request taken has been ended, then end the thread. Another is started if there is need again.
    void stop() noexcept;

private:
    static constexpr std::size_t kCapacity = 64;
    using Batch = std::array<Request*, kCapacity>;

    void serve() noexcept;

    const std::function<void(Request&)> end_;
    std::mutex mutex_;  // guards everything below
    std::condition_variable changed_;
    Batch taken_{};
    std::size_t count_ = 0;
    bool asleep_ = false;
    bool stopping_ = false;
    bool no_thread_ = false;  // to be had: not asked for again
    std::thread thread_;
};

}  // namespace deepnvme
