// What the engine has done so far, in bytes and counts.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "core/grow_only_list.h"
#include "engine/latency.h"

namespace deepnvme {

// A count with one writer and any number of readers.
class Counter {
public:
    void add(std::uint64_t amount) noexcept {
        value_.store(value_.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
    }
    std::uint64_t get() const noexcept { return value_.load(std::memory_order_relaxed); }

private:
    std::atomic<std::uint64_t> value_{0};
};

// Written by one worker.
struct WorkerCounters {
    Counter bytes_read;
    Counter bytes_written;
    Counter bytes_zero_copy;  // direct, in place
    Counter bytes_staged;     // direct, through a copy
    Counter bytes_buffered;   // through the page cache
    Counter bytes_gds;        // direct, between the drive and device memory
    Counter short_transfers;  // resumed where they stopped
    Counter retries;          // after EINTR or EAGAIN
    std::array<Counter, kLatencyBins> block_latency;  // one for each block that ended without error

    void add(const WorkerCounters& other) noexcept {
        for (const auto counter : {&WorkerCounters::bytes_read, &WorkerCounters::bytes_written, &WorkerCounters::bytes_zero_copy,
                                   &WorkerCounters::bytes_staged, &WorkerCounters::bytes_buffered, &WorkerCounters::bytes_gds,
                                   &WorkerCounters::short_transfers, &WorkerCounters::retries})
            (this->*counter).add((other.*counter).get());
        for (std::size_t bin = 0; bin < kLatencyBins; ++bin) block_latency[bin].add(other.block_latency[bin].get());
    }
};

// How often something slower was used instead, by reason. Thread-safe. On a file system without direct I/O each request counts
// one, so that drives share no lock here: it is for a reason that is new.
class FallbackCounts {
public:
    void add(const std::string& reason) {
        const auto matches = [&](const Fallback& fallback) { return fallback.reason == reason; };
        Fallback* found = fallbacks_.find(matches);
        if (!found) {
            std::lock_guard lock(mutex_);
            found = fallbacks_.find(matches);
            if (!found) found = &fallbacks_.add(reason);
        }
        found->count.fetch_add(1, std::memory_order_relaxed);
    }

    std::map<std::string, std::uint64_t> get() const {
        std::map<std::string, std::uint64_t> counts;
        fallbacks_.for_each([&](const Fallback& fallback) { counts[fallback.reason] = fallback.count.load(); });
        return counts;
    }

private:
    struct Fallback {
        std::string reason;
        std::atomic<std::uint64_t> count{0};
    };

    std::mutex mutex_;  // held to add
    GrowOnlyList<Fallback> fallbacks_;
};

struct Statistics {
    std::uint64_t requests = 0;  // ended, well or not
    std::uint64_t failed_requests = 0;
    std::uint64_t bytes_read = 0;
    std::uint64_t bytes_written = 0;
    std::uint64_t bytes_zero_copy = 0;
    std::uint64_t bytes_staged = 0;
    std::uint64_t bytes_buffered = 0;
    std::uint64_t bytes_gds = 0;
    std::uint64_t blocks = 0;  // all of block_latency
    std::array<std::uint64_t, kLatencyBins> block_latency{};
    std::uint64_t short_transfers = 0;
    std::uint64_t retries = 0;
    std::map<std::string, std::uint64_t> fallbacks;  // reason -> how often something slower was used instead
};

}  // namespace deepnvme
