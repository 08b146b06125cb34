// A thread that owns one backend and keeps it full.
//
// The invariant: the worker blocks only in Backend::reap, and only when it can start nothing: its slots, its staging or the bytes
// that may be under way are all in use, or the queue is empty. Then what completes wakes it, or what has been copied from or to a
// device; the next request, as the queue knows that it sleeps; and its alarm, when a pause ends before a block is tried again.
// (Without memory to go on, it sleeps for a millisecond.) Everything but the queue, the requests and the counters belongs to the
// one thread, with the exception of cancel_marked().
//
// No exception ends the thread. A backend that breaks is stopped, which cancels what is under way and waits for it; if even that
// fails, the system may go on using memory, so the requests concerned keep theirs for good, and so does the worker (lost()).
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <initializer_list>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "core/numa.h"
#include "engine/alarm.h"
#include "engine/backend.h"
#include "engine/device_copier.h"
#include "engine/device_io.h"
#include "engine/queue.h"
#include "engine/staging.h"
#include "engine/statistics.h"

namespace deepnvme {

struct WorkerOptions {
    std::uint32_t queue_depth;
    std::uint64_t in_flight_bytes;  // no further block is started while as many are under way
    bool single_submit;
    std::uint32_t staging_size;   // bytes in a slot
    std::uint32_t staging_slots;
    std::uint32_t page_size;
    std::uint64_t staged_reads;   // bytes of them under way at a time; one block is always allowed
    std::uint32_t device_slots;   // staging slots for blocks of device memory
    const DeviceIo* device_io;    // the backend's, which knows what its errors mean; may be null
};

// Something slower is used for a file from now on: what becomes of its transfers, and why.
using FallbackEvent = std::function<void(File&, const char* consequence, const std::string& reason)>;

inline constexpr char kBuffered[] = "go through the page cache, without direct I/O";

// What a worker tells the engine, from its thread.
struct WorkerEvents {
    std::function<void(Request&)> ended;                              // every block of the request has ended
    std::function<void()> resting;   // of some requests `ended` was called, and what there is to start has been started
    FallbackEvent fallback;
};

class Worker {
public:
    // Returns once the backend is made; throws the IoError with which the kernel refused it.
    Worker(Queue& queue, const BackendFactory& make_backend, WorkerOptions options, WorkerEvents events);
    ~Worker();

    // Wait for the thread to end. The queue has been stopped and is empty. Every worker is joined before any is destroyed, since
    // one that is still running may be waking another. Idempotent.
    void join() noexcept;

    // Let it run only on these processors, as far as the system allows it. Any thread.
    void run_on(std::span<const int> processors) { deepnvme::run_on(processors, id_); }

    // Have blocks cancelled that are under way for requests marked as cancelled. Any thread.
    void cancel_marked() noexcept;

    // Whether the system may still use memory of this worker, which must not be destroyed then. To be asked once it is joined.
    bool lost() const noexcept { return lost_; }

    const WorkerCounters& counters() const noexcept { return counters_; }

private:
    using Clock = std::chrono::steady_clock;

    struct Slot : Operation {
        Request* request = nullptr;  // of a slot in use
        Route route;
        std::uint32_t attempts;       // in a row that moved nothing
        bool under_way = false;       // taken by the backend and not reaped
        bool cancel_asked;            // of the backend, since it was taken
        std::byte* staging;           // null when the transfer is in place
        std::byte* caller_memory;     // of the whole block
        std::uint32_t block_length;
        std::size_t piece;            // as in the block
        std::uint32_t padding;        // of `length`: bytes behind the block up to the end of its page; 0 unless Route::padded
        Clock::time_point taken;      // by the backend, for the first time; the epoch until then
        Clock::time_point paused_until;
    };

    void run() noexcept;
    void serve();
    void fill();
    bool prepare(const Block& block);
    std::byte* lease_staging(const Block& block);
    void start_copy(Slot& slot, DeviceCopier::Way way);
    void finish_copies();
    void offer();
    std::size_t submit(std::span<Operation* const> operations);
    void flush();
    std::size_t reap();
    void cancel_blocks() noexcept;
    void complete(Slot& slot, std::int64_t result, Clock::time_point reaped);
    static std::uint32_t aligned_progress(const Slot& slot, std::int64_t moved);
    void resume(Slot& slot, std::uint32_t moved);
    void retry(Slot& slot);
    void retry_later(Slot& slot, int error, std::initializer_list<std::string_view> detail = {});
    void end_pauses();
    void go_buffered(Slot& slot);
    static Block block_of(const Slot& slot) noexcept;
    void fail(const Block& block, int error, std::initializer_list<std::string_view> detail = {}) noexcept;
    void end_slot(Slot& slot);
    void end_block(Request& request);
    void give_up(const IoError& error) noexcept;

    Queue& queue_;
    const WorkerOptions options_;
    const WorkerEvents events_;
    WorkerCounters counters_;

    std::vector<Slot> slots_;
    std::vector<Slot*> free_;
    std::vector<Operation*> ready_;  // prepared, not yet taken by the backend
    std::vector<Slot*> paused_;      // to be ready later, the first of them first
    std::vector<Block> backlog_;     // taken from the queue, last one first, not yet prepared
    std::vector<Completion> completions_;
    StagingRing staging_;
    StagingRing device_staging_;
    std::uint64_t in_flight_ = 0;     // bytes of the blocks in slots
    std::uint64_t staged_reads_ = 0;  // bytes of them between lease and copy
    std::size_t copying_ = 0;         // slots that the copier has
    std::size_t under_way_ = 0;  // taken by the backend and not reaped
    int refusal_ = 0;            // errno: why the backend took no more when last offered something
    bool drained_ = false;       // the queue had nothing when last asked, and will wake the backend when it has
    bool lost_ = false;
    pid_t id_ = 0;  // of the thread
    std::atomic<bool> cancels_{false};  // marked requests may have blocks that nobody has asked the backend to cancel

    std::unique_ptr<Backend> backend_;  // made by the thread, which io_uring serves fastest then; outlives it, for late wakes
    std::unique_ptr<DeviceCopier> copier_;  // made when first needed
    Alarm alarm_{[this] { backend_->wake(); }};
    std::thread thread_;
};

}  // namespace deepnvme
