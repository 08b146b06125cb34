// One drive's share of an engine: a queue, the workers that serve it, what was counted of it, and the order of its writes and
// flushes.
//
// Drives share no lock and no queue on the way of a transfer, so that one that is slow, full or broken stands in the way of no
// other.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/backend.h"
#include "engine/file_closer.h"
#include "engine/queue.h"
#include "engine/request.h"
#include "engine/statistics.h"
#include "engine/worker.h"

namespace deepnvme {

struct DriveOptions {
    std::size_t workers;
    WorkerOptions worker;
    BackendFactory make_backend;
    FallbackEvent fallback;  // called by workers
};

// Thread-safe. A request belongs to one drive from admit() to its end.
class Drive {
public:
    // Starts the workers. Throws IoError and std::bad_alloc; then none is left.
    explicit Drive(const DriveOptions& options);
    ~Drive() { stop(); }
    Drive(const Drive&) = delete;
    Drive& operator=(const Drive&) = delete;

    // Count a request in, unless `closed`: false then. From then on close waits for its end, so nothing may throw before start()
    // or dismiss(). Throws std::bad_alloc, and then nothing was counted.
    bool admit(Request& request, const std::atomic<bool>& closed);
    // Undo admit() of a request that cannot begin.
    void dismiss(Request& request) noexcept;
    // Hand an admitted request to the workers; an fsync once the writes before it have ended.
    void start(Request& request) noexcept;
    // Several at once; none is an fsync, and each has bytes to move.
    void start(std::span<Request* const> requests) noexcept { queue_.push(requests); }
    // End a request whose last outstanding count the caller has given up. May close its file here, which can block.
    void end(Request& request) noexcept;
    // The same for threads that serve other drives as well, or must not wait for this one. Its file is closed by the drive's own
    // thread for that; only if there is none to be had, here.
    void end_without_blocking(Request& request) noexcept;
    // Have a request end as soon as may be: what has not begun never does, what has is cancelled. The caller holds an outstanding
    // count.
    void cancel(Request& request) noexcept;

    // Let the workers run near the drive, where a machine has several NUMA nodes. `device`: st_dev of its files.
    void run_near(std::uint64_t device);

    // Called after each request's end, by the thread that ended it. To be set before the first request.
    void on_request_end(void (*callback)() noexcept) noexcept { end_callback_ = callback; }

    // Wait until every admitted request has ended. False if the time came first.
    bool wait_until_idle(std::optional<std::chrono::steady_clock::time_point> end);
    // End the workers, and free what they used. There are no requests any more. Idempotent; one thread at a time.
    void stop() noexcept;

    void add_to(Statistics& sum) const;

private:
    struct Barrier {
        std::uint64_t epoch;
        std::uint64_t remaining;  // writes of this epoch or before that are under way
        Request* request;
    };

    void close_and_end(Request& request) noexcept;
    void write_ended(const Request& write) noexcept;
    void count_end() noexcept;
    void count_out() noexcept;
    void tell_waiters() noexcept;

    void (*end_callback_)() noexcept = nullptr;

    // On cache lines of their own: submitters write one, workers the other.
    alignas(64) std::atomic<std::uint64_t> admitted_{0};
    alignas(64) std::atomic<std::uint64_t> ended_{0};
    std::atomic<std::uint64_t> failed_{0};
    std::atomic<bool> awaited_{false};  // somebody is in wait_until_idle

    alignas(64) mutable std::mutex mutex_;  // guards everything up to queue_
    std::condition_variable idle_;
    std::uint64_t writes_under_way_ = 0;
    std::uint64_t epoch_ = 0;  // fsyncs so far
    std::vector<Barrier> barriers_;
    WorkerCounters totals_;  // of workers that have ended

    Queue queue_;
    FileCloser closer_{[this](Request& request) { close_and_end(request); }};
    std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace deepnvme
