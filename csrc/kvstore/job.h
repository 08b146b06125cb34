// A put or get of many blocks, and how its submitter learns of its end.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/fd.h"

namespace deepnvme::kvstore {

using Keys = std::vector<std::string>;
using Flags = std::vector<std::uint8_t>;

class Job {
public:
    enum class Kind : std::uint8_t { put, get };

    // `memory`: of each key's block; it stays valid until the job is done. `event`: an eventfd of the job's own, to which 1 is added when
    // the job is done, or none.
    Job(Kind kind, Keys keys, std::vector<std::span<std::byte>> memory, Fd event)
        : kind(kind), keys(std::move(keys)), memory(std::move(memory)), flags(this->keys.size()), event_(std::move(event)) {}

    const Kind kind;
    const Keys keys;
    const std::vector<std::span<std::byte>> memory;
    Flags flags;  // whether each key was stored or read; not to be looked at before the job is done
    std::atomic<bool> memory_lost{false};  // as Request::memory_lost()

    bool done() const noexcept { return done_.load(std::memory_order_acquire); }
    // False if the time ran out first.
    bool wait_for(std::chrono::nanoseconds time) {
        std::unique_lock lock(mutex_);
        return ended_.wait_for(lock, time, [this] { return done(); });
    }
    // Called once, by the thread that has run the job.
    void finish() noexcept;

private:
    const Fd event_;
    std::atomic<bool> done_{false};
    std::mutex mutex_;
    std::condition_variable ended_;
};

}  // namespace deepnvme::kvstore
