#include "engine/drive.h"

#include <algorithm>
#include <utility>

namespace deepnvme {

namespace {

constexpr std::uint64_t kFewRequests = 2;

void add_counters(Statistics& sum, const WorkerCounters& worker) {
    sum.bytes_read += worker.bytes_read.get();
    sum.bytes_written += worker.bytes_written.get();
    sum.bytes_zero_copy += worker.bytes_zero_copy.get();
    sum.bytes_staged += worker.bytes_staged.get();
    sum.bytes_buffered += worker.bytes_buffered.get();
    sum.bytes_gds += worker.bytes_gds.get();
    sum.short_transfers += worker.short_transfers.get();
    sum.retries += worker.retries.get();
    for (std::size_t bin = 0; bin < kLatencyBins; ++bin) {
        const std::uint64_t blocks = worker.block_latency[bin].get();
        sum.block_latency[bin] += blocks;
        sum.blocks += blocks;
    }
}

}  // namespace

Drive::Drive(const DriveOptions& options) : queue_(options.workers) {
    const WorkerEvents events{[this](Request& request) { end(request); }, [this] { closer_.wake(); }, options.fallback};
    workers_.reserve(options.workers);
    try {
        for (std::size_t i = 0; i < options.workers; ++i)
            workers_.push_back(std::make_unique<Worker>(queue_, options.make_backend, options.worker, events));
    } catch (...) {
        // A limit can lie between one worker and the next (fs.aio-max-nr). Fewer workers than asked for would go unnoticed.
        stop();
        throw;
    }
}

void Drive::run_near(std::uint64_t device) {
    const auto processors = processors_near(device);
    if (processors.empty()) return;
    for (const auto& worker : workers_) worker->run_on(processors);
}

bool Drive::admit(Request& request, const std::atomic<bool>& closed) {
    request.drive_ = this;
    const bool ordered = request.kind != Request::Kind::read;
    std::unique_lock lock(mutex_, std::defer_lock);
    if (ordered) lock.lock();
    if (request.kind == Request::Kind::sync) barriers_.reserve(barriers_.size() + 1);
    // Together with close(), which sets `closed` and then looks at the counts: one of the two sees what the other did.
    admitted_.fetch_add(1);
    if (closed.load()) {
        if (ordered) lock.unlock();
        count_out();
        return false;
    }
    if (request.kind == Request::Kind::write) {
        ++writes_under_way_;
        request.epoch_ = epoch_;
    } else if (request.kind == Request::Kind::sync && writes_under_way_ > 0) {
        barriers_.push_back({epoch_++, writes_under_way_, &request});
        request.behind_barrier_ = true;
    }
    return true;
}

void Drive::dismiss(Request& request) noexcept {
    if (request.kind == Request::Kind::write) write_ended(request);
    count_out();
}

void Drive::start(Request& request) noexcept {
    if (request.behind_barrier_) return;
    if (request.kind != Request::Kind::sync && request.length == 0) {
        if (request.release()) end(request);
        closer_.wake();  // no worker does
        return;
    }
    queue_.push(request);
}

void Drive::end(Request& request) noexcept {
    // With little else to do, the worker closes the file itself: to wake another thread takes longer (15 us of processor time for
    // a read of 4 KiB, 60 instead of 45).
    const bool busy = admitted_.load(std::memory_order_relaxed) - ended_.load(std::memory_order_relaxed) > kFewRequests;
    if (!busy || !request.closes_file_ || closer_.behind() || !closer_.take_quietly(request)) close_and_end(request);
}

void Drive::end_without_blocking(Request& request) noexcept {
    if (!closer_.take(request)) close_and_end(request);
}

void Drive::close_and_end(Request& request) noexcept {
    const auto callback = end_callback_;
    const bool lost = request.memory_lost();
    // What the system may still use keeps its file too, and itself, for good.
    const auto self = lost ? request.self_ : std::move(request.self_);
    if (!lost) {
        if (request.kind == Request::Kind::write && !request.failed()) request.file_->keep();
        // Closed before anybody is told, so that the file is whole and its descriptor free when a waiter goes on.
        request.device_file.reset();
        // NFS and FUSE write what the page cache holds when the file is closed. An fsync that opens it again is not told of that.
        const auto error = File::release(request.file_);
        request.close_failed_ = error && request.kind != Request::Kind::read;
        if (request.close_failed_) {
            try {
                request.fail(IoError(error->error(), request.describe() + ": " + error->operation(), error->path()));
            } catch (const std::bad_alloc&) {
                request.fail(*error);
            }
        }
        request.permit_ = OpenFilePermit();
    }
    if (request.failed()) failed_.fetch_add(1, std::memory_order_relaxed);
    if (request.kind == Request::Kind::write) write_ended(request);
    count_end();
    // Nothing of this drive from here on: who waited for its last request may take it down, unless this is one of its workers.
    request.finish();
    if (callback) callback();
}

void Drive::cancel(Request& request) noexcept {
    request.mark_cancelled();
    if (queue_.remove(request)) {
        request.release();
    } else if (request.kind == Request::Kind::sync) {
        std::lock_guard lock(mutex_);
        if (std::erase_if(barriers_, [&](const Barrier& barrier) { return barrier.request == &request; })) request.release();
    }
    for (const auto& worker : workers_) worker->cancel_marked();
}

bool Drive::wait_until_idle(std::optional<std::chrono::steady_clock::time_point> end) {
    awaited_.store(true);
    std::unique_lock lock(mutex_);
    const auto idle = [this] { return ended_.load() == admitted_.load(); };
    if (end) return idle_.wait_until(lock, *end, idle);
    idle_.wait(lock, idle);
    return true;
}

void Drive::stop() noexcept {
    queue_.stop();
    for (const auto& worker : workers_) worker->join();
    closer_.stop();
    std::lock_guard lock(mutex_);
    for (auto& worker : workers_) {
        totals_.add(worker->counters());
        // The system may still use the memory that such a worker stages through.
        if (worker->lost()) [[maybe_unused]] Worker* kept = worker.release();
    }
    workers_.clear();
}

void Drive::add_to(Statistics& sum) const {
    sum.requests += ended_.load();
    sum.failed_requests += failed_.load();
    std::lock_guard lock(mutex_);
    add_counters(sum, totals_);
    for (const auto& worker : workers_) add_counters(sum, worker->counters());
}

void Drive::write_ended(const Request& write) noexcept {
    std::lock_guard lock(mutex_);
    --writes_under_way_;
    if (barriers_.empty()) return;
    for (Barrier& barrier : barriers_) {
        // Ahead of writes that came after it, which it need not cover.
        if (write.epoch_ <= barrier.epoch && --barrier.remaining == 0) queue_.push_early(*barrier.request);
    }
    std::erase_if(barriers_, [](const Barrier& barrier) { return barrier.remaining == 0; });
}

void Drive::count_end() noexcept {
    ended_.fetch_add(1);
    tell_waiters();
}

void Drive::count_out() noexcept {
    admitted_.fetch_sub(1);
    tell_waiters();
}

void Drive::tell_waiters() noexcept {
    if (!awaited_.load()) return;
    std::lock_guard lock(mutex_);
    idle_.notify_all();
}

}  // namespace deepnvme
