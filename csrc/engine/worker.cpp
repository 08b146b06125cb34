#include "engine/worker.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <future>
#include <limits>
#include <utility>

#include "core/copy.h"
#include "core/threads.h"

namespace deepnvme {

namespace {

// Blocks taken from the queue and given to the kernel at a time: enough to make the lock and the system call cheap, few enough
// that the first is on its way while the last is prepared, and that other workers get their share.
constexpr std::size_t kBatch = 16;

// EAGAIN and EINTR pass, and so does what a backend without room or memory says; but not if it is said for this long.
constexpr std::uint32_t kMostAttempts = 1000;
constexpr std::uint32_t kEagerAttempts = 8;
constexpr auto kPause = std::chrono::milliseconds(1);

// A number as text, without allocating.
class Decimal {
public:
    explicit Decimal(std::uint64_t number) : end_(std::to_chars(digits_, digits_ + sizeof digits_, number).ptr) {}
    operator std::string_view() const { return {digits_, static_cast<std::size_t>(end_ - digits_)}; }

private:
    char digits_[20];
    char* end_;
};

}  // namespace

Worker::Worker(Queue& queue, const BackendFactory& make_backend, WorkerOptions options, WorkerEvents events)
    : queue_(queue),
      options_(options),
      events_(std::move(events)),
      slots_(options.queue_depth),
      completions_(options.queue_depth),
      staging_(options.staging_size, options.staging_slots, options.page_size),
      device_staging_(options.staging_size, options.device_slots, options.page_size, /*for_devices=*/true) {
    // So that nothing below allocates once operations are under way.
    free_.reserve(options.queue_depth);
    ready_.reserve(options.queue_depth);
    paused_.reserve(options.queue_depth);
    backlog_.reserve(std::max<std::size_t>(kBatch, 1));
    for (std::uint32_t i = options.queue_depth; i-- > 0;) {
        slots_[i].index = i;
        free_.push_back(&slots_[i]);
    }
    std::promise<void> starting;
    auto started = starting.get_future();
    auto serve = [this, make_backend, starting = std::move(starting)]() mutable {
        ::pthread_setname_np(::pthread_self(), "deepnvme");
        id_ = static_cast<pid_t>(::syscall(SYS_gettid));
        try {
            backend_ = make_backend(options_.queue_depth);
        } catch (...) {
            starting.set_exception(std::current_exception());
            return;
        }
        starting.set_value();
        run();
    };
    thread_ = start_thread(std::move(serve));
    try {
        started.get();
    } catch (...) {
        thread_.join();
        throw;
    }
}

Worker::~Worker() {
    if (thread_.joinable()) thread_.join();
}

void Worker::join() noexcept {
    if (thread_.joinable()) thread_.join();
}

void Worker::cancel_marked() noexcept {
    cancels_.store(true);
    backend_->wake();
}

void Worker::run() noexcept {
    try {
        serve();
    } catch (const IoError& error) {
        give_up(error);
    } catch (const std::bad_alloc&) {
        give_up(IoError::out_of_memory());
    } catch (const std::exception&) {
        give_up(IoError(EIO, "an unexpected error of a worker", ""));
    }
}

void Worker::serve() {
    while (true) {
        end_pauses();
        if (cancels_.load(std::memory_order_relaxed)) cancel_blocks();
        fill();
        if (free_.size() == slots_.size()) {
            if (!drained_) continue;  // what was prepared has failed at once, and there is room for more
            if (queue_.stopped()) return events_.resting();
        }
        events_.resting();
        const std::size_t count = reap();
        const auto reaped = Clock::now();
        under_way_ -= count;
        for (std::size_t i = 0; i < count; ++i) static_cast<Slot&>(*completions_[i].operation).under_way = false;
        for (std::size_t i = 0; i < count; ++i)
            complete(static_cast<Slot&>(*completions_[i].operation), completions_[i].result, reaped);
        if (copying_ > 0) finish_copies();
    }
}

// Backends run out of memory before they begin anything; what is under way can free some.
std::size_t Worker::reap() {
    try {
        return backend_->reap(completions_);
    } catch (const std::bad_alloc&) {
        std::this_thread::sleep_for(kPause);
        return 0;
    }
}

// Starts what the backend has taken, while more is prepared.
void Worker::flush() {
    try {
        backend_->flush();
    } catch (const std::bad_alloc&) {  // it starts with the next reap
    }
}

std::size_t Worker::submit(std::span<Operation* const> operations) {
    refusal_ = EAGAIN;
    try {
        return backend_->submit(operations);
    } catch (const std::bad_alloc&) {
        refusal_ = ENOMEM;
        return 0;
    }
}

void Worker::cancel_blocks() noexcept {
    cancels_.exchange(false);  // sees the marks that were made before it was set
    for (Slot& slot : slots_) {
        if (!slot.under_way || slot.cancel_asked || !slot.request->cancelled()) continue;
        slot.cancel_asked = backend_->cancel(slot);
        if (slot.cancel_asked) continue;
        cancels_.store(true);
        alarm_.set(Clock::now() + kPause);
    }
    const auto end_cancelled = [this](Operation* operation) {
        Slot& slot = static_cast<Slot&>(*operation);
        if (!slot.request->cancelled()) return false;
        end_slot(slot);
        return true;
    };
    std::erase_if(ready_, end_cancelled);
    std::erase_if(paused_, end_cancelled);
}

void Worker::fill() {
    offer();
    while (!free_.empty()) {
        if (backlog_.empty()) {
            // What could not be started at once is left to other workers.
            if (in_flight_ >= options_.in_flight_bytes) break;
            backlog_.resize(std::min(kBatch, free_.size()));
            backlog_.resize(queue_.take(backlog_, options_.in_flight_bytes - in_flight_, *backend_));
            drained_ = backlog_.empty();
            if (drained_) break;
            std::reverse(backlog_.begin(), backlog_.end());
        }
        const Block block = backlog_.back();
        if (!prepare(block)) break;  // staging is full; a completion makes room
        backlog_.pop_back();
        // A staged block goes to the kernel before the next is copied. Padded ones copy less than a page each: they go together.
        if (options_.single_submit || block.route == Route::staged || ready_.size() >= kBatch) {
            offer();
            flush();
        }
    }
    offer();
}

// False when the block has to wait for a staging slot.
bool Worker::prepare(const Block& block) {
    Request& request = *block.request;
    if (request.failed(block)) {
        end_block(request);
        return true;
    }
    int fd;
    Route route = block.route;
    std::byte* staging = nullptr;
    try {
        File& file = request.file();
        fd = request.kind == Request::Kind::sync ? file.any_descriptor() : route == Route::buffered ? -1 : file.direct();
        if (fd < 0 && route != Route::gds) {
            route = Route::buffered;  // as planned, or because direct I/O has been refused since
            fd = file.buffered();
        }
        const bool bounced = route == Route::staged || route == Route::padded || (request.device && route != Route::gds);
        if (bounced && !(staging = lease_staging(block))) return false;
    } catch (const IoError& error) {
        if (error.path().empty()) fail(block, error.error(), {": ", error.operation()});  // CUDA's
        else request.fail(block, error);
        end_block(request);
        return true;
    } catch (const std::bad_alloc&) {
        fail(block, ENOMEM, {": no memory for staging"});
        end_block(request);
        return true;
    }
    // Nothing is thrown from here on.
    Slot& slot = *free_.back();
    free_.pop_back();
    slot.kind = request.kind;
    slot.fd = fd;
    slot.padding = route == Route::padded ? options_.page_size - block.length : 0;
    slot.length = block.length + slot.padding;
    slot.memory = staging ? staging : block.memory;
    slot.offset = block.offset;
    slot.request = &request;
    slot.route = route;
    slot.attempts = 0;
    slot.taken = {};
    slot.staging = staging;
    slot.caller_memory = block.memory;
    slot.block_length = block.length;
    in_flight_ += block.length;
    slot.piece = block.piece;
    slot.device_file = route == Route::gds ? request.device_file.get() : nullptr;
    slot.device = route == Route::gds ? *request.device : -1;
    if (staging && slot.kind == Operation::Kind::write) {
        std::memset(staging + block.length, 0, slot.padding);  // a lease is whole pages, so there is room for it
        if (request.device) {
            start_copy(slot, DeviceCopier::Way::from_device);
            return true;
        }
        copy_past_cache(staging, block.memory, block.length);
    }
    ready_.push_back(&slot);
    return true;
}

// Null while there is none. Throws IoError and std::bad_alloc.
std::byte* Worker::lease_staging(const Block& block) {
    const Request& request = *block.request;
    if (block.length == 0) return nullptr;
    if (request.device) {
        const CudaContextGuard context(*request.device);
        return device_staging_.lease(block.length);
    }
    // What has been read waits in the cache for its copy; see engine.cpp.
    const bool read = request.kind == Request::Kind::read;
    if (read && staged_reads_ > 0 && staged_reads_ + block.length > options_.staged_reads) return nullptr;
    std::byte* staging = staging_.lease(block.length);
    if (staging && read) staged_reads_ += block.length;
    return staging;
}

void Worker::start_copy(Slot& slot, DeviceCopier::Way way) {
    try {
        if (!copier_) copier_ = std::make_unique<DeviceCopier>([this] { backend_->wake(); });
        copier_->start(way, slot.staging, *slot.request->device, slot.caller_memory, slot.block_length, &slot);
        ++copying_;
    } catch (const IoError& error) {
        fail(block_of(slot), error.error(), {": ", error.operation()});
        end_slot(slot);
    } catch (const std::bad_alloc&) {
        fail(block_of(slot), ENOMEM, {": no memory for a copy of device memory"});
        end_slot(slot);
    }
}

// A write's block is on the host now and goes to the drive; a read's is on the device, which is its end.
void Worker::finish_copies() {
    std::vector<DeviceCopier::Copied> copied;
    try {
        copied = copier_->take();
    } catch (const std::bad_alloc&) {  // they are there the next time
        std::this_thread::sleep_for(kPause);
        return backend_->wake();
    }
    for (const auto& [tag, error] : copied) {
        Slot& slot = *static_cast<Slot*>(tag);
        --copying_;
        if (error) fail(block_of(slot), error->error(), {": copy of device memory: ", error->operation()});
        if (slot.kind == Operation::Kind::write && !slot.request->failed(block_of(slot))) ready_.push_back(&slot);
        else end_slot(slot);
    }
}

void Worker::offer() {
    std::size_t taken = 0;
    bool full = false;
    while (taken < ready_.size() && !full) {
        const std::size_t count = options_.single_submit ? 1 : ready_.size() - taken;
        const auto offered = std::span(ready_).subspan(taken, count);
        const auto now = Clock::now();
        // Before they are taken: a backend that breaks meanwhile may have begun any of them.
        for (Operation* operation : offered) {
            static_cast<Slot&>(*operation).under_way = true;
            static_cast<Slot&>(*operation).cancel_asked = false;
        }
        const std::size_t accepted = submit(offered);
        for (Operation* operation : offered.subspan(accepted)) static_cast<Slot&>(*operation).under_way = false;
        for (Operation* operation : offered.first(accepted)) {
            Slot& slot = static_cast<Slot&>(*operation);
            if (slot.taken == Clock::time_point()) slot.taken = now;
        }
        taken += accepted;
        under_way_ += accepted;
        full = accepted < count;
    }
    ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(taken));
    if (!full) return;
    // What is under way makes room when it is reaped, unless it hangs. If nothing is, others hold what is short: time must pass.
    if (under_way_ > 0) return alarm_.set(Clock::now() + kPause);
    const auto why = refusal_ == ENOMEM ? ": no memory to start it" : ": the system takes no more operations";
    for (Operation* operation : ready_) retry_later(static_cast<Slot&>(*operation), refusal_, {why});
    ready_.clear();
}

void Worker::complete(Slot& slot, std::int64_t result, Clock::time_point reaped) {
    Request& request = *slot.request;
    if (result == -EINTR || result == -EAGAIN) {
        counters_.retries.add(1);
        if (slot.attempts >= kEagerAttempts) return retry_later(slot, static_cast<int>(-result));
        ++slot.attempts;
        return retry(slot);
    }
    if (result == -EINVAL && slot.route != Route::buffered && slot.route != Route::gds) {
        // Some file systems accept O_DIRECT when opening and refuse it at the first transfer.
        try {
            const std::string reason = "a direct " + std::string(slot.kind == Operation::Kind::read ? "read" : "write") +
                                       " was refused: " + describe_errno(EINVAL);
            if (request.file().refuse_direct(reason)) events_.fallback(request.file(), kBuffered, reason);
        } catch (const std::bad_alloc&) {  // the next refusal says it
        }
        return go_buffered(slot);
    }
    if (result < 0 && slot.route == Route::gds) {
        try {
            const IoError error = options_.device_io->explain(result);
            fail(block_of(slot), error.error(), {error.operation().empty() ? "" : ": ", error.operation()});
        } catch (const std::bad_alloc&) {
            request.fail(block_of(slot), IoError::out_of_memory());
        }
        return end_slot(slot);
    }
    if (result < 0) {
        fail(block_of(slot), static_cast<int>(-result));
        return end_slot(slot);
    }
    if (slot.kind == Operation::Kind::sync) return end_slot(slot);
    if (result == 0) {
        if (slot.kind == Operation::Kind::read) fail(block_of(slot), ENODATA, {", which the file no longer has"});
        else fail(block_of(slot), EIO, {": nothing was written at byte ", Decimal(slot.offset)});
        return end_slot(slot);
    }

    // Without the padding: at the end of a file, a read may not get that far.
    const std::uint32_t wanted = slot.length - slot.padding;
    const std::uint32_t moved = result >= wanted                  ? wanted
                                : slot.route == Route::buffered ? static_cast<std::uint32_t>(result)
                                                                : aligned_progress(slot, result);
    if (moved > 0) slot.attempts = 0;
    (slot.kind == Operation::Kind::read ? counters_.bytes_read : counters_.bytes_written).add(moved);
    (slot.route == Route::buffered ? counters_.bytes_buffered
     : slot.route == Route::gds    ? counters_.bytes_gds
     : slot.staging                ? counters_.bytes_staged
                                   : counters_.bytes_zero_copy)
        .add(moved);
    if (moved < wanted) {
        counters_.short_transfers.add(1);
        return resume(slot, moved);
    }
    const auto took = std::chrono::nanoseconds(reaped - slot.taken).count();
    counters_.block_latency[latency_bin(static_cast<std::uint64_t>(took))].add(1);
    if (slot.staging && slot.kind == Operation::Kind::read) {
        if (request.device) return start_copy(slot, DeviceCopier::Way::to_device);
        copy_past_cache(slot.caller_memory, slot.staging, slot.block_length);
    }
    end_slot(slot);
}

// How much of what a direct transfer moved counts: the rest must again be fit for a direct transfer.
std::uint32_t Worker::aligned_progress(const Slot& slot, std::int64_t moved) {
    const auto limits = slot.request->file().limits().value_or(DirectLimits{1, 1});
    const std::uint32_t unit = std::max(limits.memory_alignment, limits.offset_alignment);
    return static_cast<std::uint32_t>(moved / unit * unit);
}

// Resume a short transfer where it stopped. A direct write stays direct, though it may have to write a few bytes again: in the
// page cache it could collide with the direct blocks beside it. A read may go there, and must, to find the end of a file.
void Worker::resume(Slot& slot, std::uint32_t moved) {
    slot.offset += moved;
    slot.memory += moved;
    slot.length -= moved;
    if (moved > 0) return retry(slot);
    if (slot.kind == Operation::Kind::read && slot.route != Route::gds) return go_buffered(slot);
    if (++slot.attempts <= kMostAttempts) return retry(slot);
    fail(block_of(slot), EIO, {": no progress at byte ", Decimal(slot.offset)});
    end_slot(slot);
}

// The rest of the block, or all of it, once more; offered with the next submission.
void Worker::retry(Slot& slot) {
    if (slot.request->cancelled()) end_slot(slot);
    else ready_.push_back(&slot);
}

// The same, after a pause. With `error`, if that has been of no use often enough.
void Worker::retry_later(Slot& slot, int error, std::initializer_list<std::string_view> detail) {
    if (++slot.attempts > kMostAttempts) fail(block_of(slot), error, detail);
    if (slot.attempts > kMostAttempts || slot.request->cancelled()) return end_slot(slot);
    slot.paused_until = Clock::now() + kPause;
    paused_.push_back(&slot);
    alarm_.set(slot.paused_until);
}

void Worker::end_pauses() {
    if (paused_.empty()) return;
    const auto now = Clock::now();
    const auto still_paused = [now](const Slot* slot) { return slot->paused_until > now; };
    const auto paused = std::find_if(paused_.begin(), paused_.end(), still_paused);
    ready_.insert(ready_.end(), paused_.begin(), paused);
    paused_.erase(paused_.begin(), paused);
    if (!paused_.empty()) alarm_.set(paused_.front()->paused_until);
}

void Worker::go_buffered(Slot& slot) {
    try {
        slot.fd = slot.request->file().buffered();
    } catch (const IoError& error) {
        slot.request->fail(block_of(slot), error);
        return end_slot(slot);
    } catch (const std::bad_alloc&) {
        slot.request->fail(block_of(slot), IoError::out_of_memory());
        return end_slot(slot);
    }
    slot.route = Route::buffered;
    retry(slot);
}

Block Worker::block_of(const Slot& slot) noexcept {
    const auto moved = static_cast<std::uint64_t>(slot.memory - (slot.staging ? slot.staging : slot.caller_memory));
    return {slot.request, slot.caller_memory, slot.offset - moved, slot.block_length, slot.route, slot.piece};
}

void Worker::fail(const Block& block, int error, std::initializer_list<std::string_view> detail) noexcept {
    Request& request = *block.request;
    try {
        std::string what = request.describe(block);
        for (const auto part : detail) what += part;
        if (error == ENOSPC) what += " (" + request.file().free_space_for(block.length) + ")";
        request.fail(block, IoError(error, std::move(what), request.file().path()));
    } catch (const std::bad_alloc&) {
        request.fail(block, IoError::out_of_memory());
    }
}

void Worker::end_slot(Slot& slot) {
    Request& request = *slot.request;
    if (slot.staging && request.device) {
        device_staging_.release(slot.staging, slot.block_length);
    } else if (slot.staging) {
        staging_.release(slot.staging, slot.block_length);
        if (slot.kind == Operation::Kind::read) staged_reads_ -= slot.block_length;
    }
    in_flight_ -= slot.block_length;
    slot.request = nullptr;
    free_.push_back(&slot);
    end_block(request);
}

void Worker::end_block(Request& request) {
    // A request that has failed gets no further blocks, but of many pieces the others go on. Giving blocks up also gives up the
    // count that stood for them.
    if (request.failed() && !request.pieces_ && queue_.remove(request)) request.release();
    if (request.release()) events_.ended(request);
}

// The backend is broken, and what it has begun has failed. The rest goes to the drive's other workers; without any, it fails as
// well.
void Worker::give_up(const IoError& error) noexcept {
    // Backend and copier may still use memory that ends with the requests.
    const bool safe = backend_->stop();
    if (copier_) copier_->drain();
    lost_ = !safe;
    const auto end_with_error = [&](const Block& block) {
        fail(block, error.error(), {": ", error.operation()});
        end_block(*block.request);
    };
    for (Slot& slot : slots_) {
        if (!slot.request) continue;
        if (slot.under_way && !safe) slot.request->lose_memory();
        const Block block = block_of(slot);
        slot.request = nullptr;
        if (slot.under_way || !queue_.give_back(block)) end_with_error(block);
    }
    for (const Block& block : backlog_)
        if (!queue_.give_back(block)) end_with_error(block);
    events_.resting();
    if (!queue_.leave()) return;
    while (!queue_.stopped()) {
        backlog_.resize(kBatch);
        backlog_.resize(queue_.take(backlog_, std::numeric_limits<std::uint64_t>::max(), *backend_));
        for (const Block& block : backlog_) end_with_error(block);
        events_.resting();
        if (backlog_.empty()) std::this_thread::sleep_for(10 * kPause);
    }
}

}  // namespace deepnvme
