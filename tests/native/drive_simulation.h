// Load for simulated drives, with the engine and without it: benchmarks/engine_ceiling.py compares the two.
//
// A load runs from its construction until stop(). What it moves is read from the drives meanwhile, so that neither its beginning
// nor its end is measured.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "simulated_drive.h"

namespace deepnvme::testing {

using Drives = std::vector<std::shared_ptr<SimulatedDrive>>;

// Addresses that nothing is stored at, for transfers that move nothing.
class ReservedMemory {
public:
    explicit ReservedMemory(std::uint64_t size)
        : size_(size), start_(::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
        if (start_ == MAP_FAILED) throw IoError(errno, "mmap", "");
    }
    ~ReservedMemory() { ::munmap(start_, size_); }
    ReservedMemory(const ReservedMemory&) = delete;
    ReservedMemory& operator=(const ReservedMemory&) = delete;

    std::byte* data() const noexcept { return static_cast<std::byte*>(start_); }

private:
    const std::uint64_t size_;
    void* const start_;
};

// Threads that do nothing but submit and reap, always `depth` blocks at each drive: what is possible without the engine.
class BareLoad {
public:
    // `polling_threads`: as many divide the drives among them and never sleep. Zero: a thread for each drive sleeps while nothing
    // is due, as a worker does.
    BareLoad(Drives drives, std::uint32_t block_size, std::uint32_t depth, unsigned polling_threads)
        : drives_(std::move(drives)), block_size_(block_size), depth_(depth), polling_(polling_threads > 0) {
        const std::size_t count = polling_threads ? std::min<std::size_t>(polling_threads, drives_.size()) : drives_.size();
        for (std::size_t i = 0; i < count; ++i) {
            Drives mine;
            for (std::size_t drive = i; drive < drives_.size(); drive += count) mine.push_back(drives_[drive]);
            threads_.emplace_back([this, mine] { run(mine); });
        }
    }
    ~BareLoad() { stop(); }

    // Idempotent. The drives are unplugged.
    void stop() {
        stopped_.store(true);
        for (const auto& drive : drives_) drive->become(SimulatedDrive::State::unplugged);
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
    }

private:
    void run(const Drives& drives) {
        std::vector<std::unique_ptr<SimulatedBackend>> backends;
        std::vector<Operation> operations(depth_ * drives.size());
        std::vector<Operation*> offered;
        std::vector<Completion> completions(depth_);
        for (std::size_t i = 0; i < drives.size(); ++i) {
            backends.push_back(std::make_unique<SimulatedBackend>(drives[i], depth_));
            offered.clear();
            for (std::uint32_t j = 0; j < depth_; ++j) {
                Operation& operation = operations[i * depth_ + j];
                operation = {Operation::Kind::read, -1, j, block_size_, nullptr, 0};
                offered.push_back(&operation);
            }
            backends[i]->submit(offered);
        }
        while (!stopped_.load(std::memory_order_relaxed)) {
            for (const auto& backend : backends) {
                const std::size_t count = polling_ ? backend->poll(completions) : backend->reap(completions);
                if (count == 0) continue;
                offered.clear();
                for (std::size_t i = 0; i < count; ++i) offered.push_back(completions[i].operation);
                backend->submit(offered);
            }
        }
    }

    const Drives drives_;
    const std::uint32_t block_size_;
    const std::uint32_t depth_;
    const bool polling_;
    std::atomic<bool> stopped_{false};
    std::vector<std::thread> threads_;
};

// An engine for all drives, with a file on each.
class EngineLoad {
public:
    // `paths`: a file for each drive, of at least `file_size` bytes, of which not one is read.
    // `workers`: for each drive. `depth`: of each worker.
    // `single_blocks`: a thread for each drive keeps twice `depth` requests of one block under way, and replaces those that fail
    // as well. Otherwise each drive has one long read, cut into blocks by its workers.
    EngineLoad(Drives drives, const std::vector<std::string>& paths, std::uint64_t file_size, std::uint32_t block_size,
               std::uint32_t depth, std::uint32_t workers, bool single_blocks)
        : drives_(std::move(drives)), file_size_(file_size), block_size_(block_size), memory_(file_size) {
        for (std::size_t i = 0; i < drives_.size(); ++i)
            files_.push_back(std::make_shared<File>(paths.at(i), Access::read, Creation::must_exist));
        // The engine starts a drive's workers when it first meets one of its files, which is in this order.
        const auto make = [this, workers](unsigned capacity) -> std::unique_ptr<Backend> {
            return std::make_unique<SimulatedBackend>(drives_.at(backends_++ / workers), capacity);
        };
        engine_ = std::make_unique<Engine>(EngineOptions{"simulated", block_size, depth, workers, false}, "simulated", make);
        engine_->set_drive_of([this](const File& file) -> std::uint64_t {
            return std::ranges::find(files_, &file, &std::shared_ptr<File>::get) - files_.begin();
        });
        const std::uint64_t length = single_blocks ? block_size : file_size;
        for (const auto& file : files_) requests_.push_back(engine_->read(memory_.data(), length, file, 0));
        if (!single_blocks) return;
        for (const auto& file : files_) threads_.emplace_back([this, file, count = 2 * depth] { feed(file, count); });
    }
    ~EngineLoad() { stop(); }

    // Idempotent. The drives are unplugged.
    void stop() {
        stopped_.store(true);
        for (const auto& drive : drives_) drive->become(SimulatedDrive::State::unplugged);
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
        engine_->close();
    }

private:
    void feed(const std::shared_ptr<File>& file, std::size_t count) {
        std::deque<std::shared_ptr<Request>> requests;
        std::uint64_t offset = 0;
        while (!stopped_.load(std::memory_order_relaxed)) {
            requests.push_back(engine_->read(memory_.data() + offset, block_size_, file, static_cast<std::int64_t>(offset)));
            offset = offset + 2 * block_size_ <= file_size_ ? offset + block_size_ : 0;
            while (!requests.empty() && (requests.size() >= count || requests.front()->done())) {
                requests.front()->wait();
                requests.pop_front();
            }
        }
        for (const auto& request : requests) request->wait();
    }

    const Drives drives_;
    const std::uint64_t file_size_;
    const std::uint32_t block_size_;
    const ReservedMemory memory_;
    std::vector<std::shared_ptr<File>> files_;
    std::atomic<std::size_t> backends_{0};  // made so far
    std::unique_ptr<Engine> engine_;
    std::vector<std::shared_ptr<Request>> requests_;
    std::atomic<bool> stopped_{false};
    std::vector<std::thread> threads_;
};

}  // namespace deepnvme::testing
