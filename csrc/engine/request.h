// One read, write or fsync under way, and how its submitter learns of its end.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "core/cuda.h"
#include "core/error.h"
#include "core/file.h"
#include "core/process.h"
#include "engine/backend.h"
#include "engine/open_files.h"
#include "engine/plan.h"

namespace deepnvme {

// Made and ended by the engine; done(), wait() and error() are for anybody, at any time.
class Request {
public:
    using Kind = Operation::Kind;

    Request(Kind kind, std::shared_ptr<File> file, std::byte* memory, std::uint64_t offset, std::uint64_t length,
            std::optional<CudaDevice> device = {})
        : kind(kind),
          memory(memory),
          offset(offset),
          length(length),
          device(device),
          generation_(process_generation()),
          file_(std::move(file)) {}

    const Kind kind;
    std::byte* const memory;
    const std::uint64_t offset;  // bytes into the file
    const std::uint64_t length;  // bytes
    const std::optional<CudaDevice> device;  // where the memory is; empty for the host's
    std::shared_ptr<void> device_file;       // if that memory is transferred by a DeviceIo

    // Valid until the request is done.
    File& file() const noexcept { return *file_; }

    bool done() const noexcept { return done_.load(std::memory_order_acquire); }
    void wait();
    // False if the time ran out first.
    bool wait_for(std::chrono::nanoseconds time);
    // Throws std::runtime_error in a forked child, where nobody would end the request.
    void check_process() const;
    // Empty while under way and after success.
    std::optional<IoError> error() const;

    // "write of 4096 bytes at offset 0"
    std::string describe() const { return describe(kind, length, offset); }
    static std::string describe(Kind kind, std::uint64_t length, std::uint64_t offset);

private:
    friend class Engine;
    friend class Queue;
    friend class Worker;

    // The first error is the one that is told.
    void fail(IoError error);
    bool failed() const noexcept { return failed_.load(std::memory_order_relaxed); }

    const std::uint64_t generation_;
    std::shared_ptr<File> file_;
    OpenFilePlace place_;  // for a file that this request alone has open

    // Cutting into blocks; guarded by the queue's mutex.
    Plan plan_;
    std::uint32_t span_ = 0;
    std::uint64_t cursor_ = 0;
    Request* next_ = nullptr;

    // Blocks handed out and not ended, plus one while there are blocks to hand out. Zero ends the request.
    std::atomic<std::uint64_t> outstanding_{1};
    std::shared_ptr<Request> self_;  // alive while the engine works on it, whoever else forgets it
    std::uint64_t epoch_ = 0;        // guarded by the engine's mutex

    std::atomic<bool> done_{false};
    std::atomic<bool> failed_{false};
    mutable std::mutex mutex_;
    std::condition_variable ended_;
    std::optional<IoError> error_;
};

}  // namespace deepnvme
