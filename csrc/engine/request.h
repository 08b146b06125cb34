// One read, write or fsync under way, and how its submitter learns of its end.
//
// Its life: made by the engine, counted in and queued by its drive, handed out to workers block by block, and ended when no block
// of it is under way or left. Who holds one of its `outstanding_` counts (a worker for each block, the queue for the blocks that
// are left, a fence or barrier before that, whoever cancels it) keeps it from ending.
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
#include "engine/pieces.h"
#include "engine/plan.h"

namespace deepnvme {

class Drive;

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
    const std::uint64_t length;  // bytes, of all pieces together where there are several
    const std::optional<CudaDevice> device;  // where the memory is; empty for the host's
    std::shared_ptr<void> device_file;       // if that memory is transferred by a DeviceIo

    // Valid until the request is done.
    File& file() const noexcept { return *file_; }

    bool done() const noexcept { return state_.load(std::memory_order_acquire) & kDone; }
    void wait();
    // False if the time ran out first.
    bool wait_for(std::chrono::nanoseconds time);
    // Throws std::runtime_error in a forked child, where nobody would end the request.
    void check_process() const;
    // Empty while under way and after success.
    std::optional<IoError> error() const;
    // Whether the system may use the memory for ever, though the request has ended: its backend broke, and could not be stopped.
    // The memory must never be freed or used again then. To be asked when the request is done.
    bool memory_lost() const noexcept { return memory_lost_.load(std::memory_order_relaxed); }

    // Whether its file could not be closed: then no byte that was written to it, by whatever request, need be there. To be asked
    // when the request is done.
    bool close_failed() const noexcept { return close_failed_; }

    // Of a request of many; else null. Which of them have failed is known once the request is done.
    const Pieces* pieces() const noexcept { return pieces_.get(); }

    // "write of 4096 bytes at offset 0", or "write of 8192 bytes in 2 pieces"
    std::string describe() const;
    // Of many pieces, the first that the block belongs to.
    std::string describe(const Block& block) const;
    static std::string describe(Kind kind, std::uint64_t length, std::uint64_t offset);

private:
    friend class Drive;
    friend class Engine;
    friend class FileCloser;
    friend class Queue;
    friend class Worker;

    // The first error is the one that is told. To be called by a holder of an outstanding count. With a block, only the pieces
    // fail that it belongs to, if there are several.
    void fail(const IoError& error) noexcept;
    void fail(const Block& block, const IoError& error) noexcept;
    bool failed() const noexcept { return failed_.load(std::memory_order_relaxed); }
    // Whether there is no use in the block any more.
    bool failed(const Block& block) const noexcept { return failed() && (!pieces_ || pieces_->failed(block)); }
    void note(const IoError& error) noexcept;
    // Have it end early: blocks that are under way are cancelled by their workers.
    void mark_cancelled() noexcept { cancelled_.store(true, std::memory_order_relaxed); }
    bool cancelled() const noexcept { return cancelled_.load(std::memory_order_relaxed); }
    void lose_memory() noexcept { memory_lost_.store(true, std::memory_order_relaxed); }

    // Another outstanding count, unless the request is ending.
    bool hold() noexcept;
    // Give one up. True for the last: the caller then ends the request.
    bool release() noexcept { return outstanding_.fetch_sub(1, std::memory_order_acq_rel) == 1; }
    // Tell whoever waits that it has ended.
    void finish() noexcept;
    // Announce a waiter, with mutex_ held. False if there is nothing to wait for.
    bool announce() noexcept { return !(state_.fetch_or(kWaitedFor, std::memory_order_acq_rel) & kDone); }

    const std::uint64_t generation_;
    std::shared_ptr<File> file_;
    OpenFilePermit permit_;  // for a file that this request alone has open
    bool close_failed_ = false;
    bool closes_file_ = false;  // as a rule, or another request of the same call: the file is one by path

    // Cutting into blocks; guarded by the queue's mutex.
    std::unique_ptr<Pieces> pieces_;  // else the request is one transfer, cut by what follows
    Plan plan_;
    std::uint32_t span_ = 0;
    bool queued_ = false;
    std::uint64_t cursor_ = 0;
    Request* next_ = nullptr;  // of the queue; behind its end, of those whose files are to be closed
    Request* previous_ = nullptr;

    // Blocks handed out and not ended, plus one while there are blocks to hand out. Zero ends the request.
    std::atomic<std::uint64_t> outstanding_{1};
    Drive* drive_ = nullptr;
    std::shared_ptr<Request> self_;  // alive while the engine works on it, whoever else forgets it
    std::uint64_t epoch_ = 0;        // of a write: how many fsyncs came before it
    bool behind_barrier_ = false;    // an fsync that starts when the writes before it have ended

    static constexpr std::uint8_t kDone = 1;
    static constexpr std::uint8_t kWaitedFor = 2;
    std::atomic<std::uint8_t> state_{0};
    std::atomic<bool> failed_{false};
    std::atomic<bool> cancelled_{false};
    std::atomic<bool> memory_lost_{false};
    mutable std::mutex mutex_;  // guards the error until the request is done
    std::condition_variable ended_;
    std::optional<IoError> error_;
};

}  // namespace deepnvme
