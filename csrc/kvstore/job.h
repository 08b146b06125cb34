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

#include "core/process.h"

namespace deepnvme::kvstore {

using Keys = std::vector<std::string>;

class Job {
public:
    enum class Kind : std::uint8_t { put, get };

    // `memory`: of each key's block; it stays valid until the job is done. `event`: an eventfd to which 1 is added at the end, or -1.
    Job(Kind kind, Keys keys, std::vector<std::span<std::byte>> memory, int event)
        : kind(kind), keys(std::move(keys)), memory(std::move(memory)), flags(this->keys.size()), event_(event) {}

    const Kind kind;
    const Keys keys;
    const std::vector<std::span<std::byte>> memory;
    std::vector<std::uint8_t> flags;  // of each key whether it was stored or read; to be looked at once the job is done
    std::atomic<bool> memory_lost{false};  // as Request::memory_lost()

    bool done() const noexcept { return done_.load(std::memory_order_acquire); }
    bool of_this_process() const noexcept { return generation_ == process_generation(); }
    // False if the time ran out first.
    bool wait_for(std::chrono::nanoseconds time) {
        std::unique_lock lock(mutex_);
        return ended_.wait_for(lock, time, [this] { return done(); });
    }
    // By whoever ran it, once.
    void finish() noexcept;

private:
    const int event_;
    const std::uint64_t generation_ = process_generation();
    std::atomic<bool> done_{false};
    std::mutex mutex_;
    std::condition_variable ended_;
};

}  // namespace deepnvme::kvstore
