#include "bindings/session.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/many_transfers.h"

namespace deepnvme::bindings {

namespace {

// False for one that another thread is just submitting.
bool has_ended(Pending& pending) { return pending.submitted() && pending.done(); }

constexpr auto kLookForSignals = std::chrono::milliseconds(50);
constexpr auto kPatienceAtExit = std::chrono::seconds(3);  // until somebody would wonder

// Engines to be drained before the interpreter takes their tensors away.
std::set<Session*>& live_sessions() {
    static auto* sessions = new std::set<Session*>;
    return *sessions;
}

// Where there is no stderr any more, nobody would read it: the waiting goes on.
void warn_at_exit(const std::string& message) {
    try {
        nb::module_::import_("sys").attr("stderr").attr("write")(decoded(message));
    } catch (nb::python_error& error) {
        if (error.matches(PyExc_KeyboardInterrupt)) throw;
    }
}

// The last that Python calls as it ends, which would exit with status 0 otherwise: it ignores what exit handlers raise.
void end_by_interrupt() noexcept {
    std::fflush(nullptr);
    std::signal(SIGINT, SIG_DFL);
    std::raise(SIGINT);
}

void register_exit_hook() {
    static bool registered = false;
    if (registered) return;
    registered = true;
    nb::module_::import_("atexit").attr("register")(nb::cpp_function([] {
        const std::vector<Session*> sessions(live_sessions().begin(), live_sessions().end());
        for (Session* session : sessions) {
            try {
                if (live_sessions().contains(session)) session->close_at_exit();
            } catch (nb::python_error& error) {
                error.discard_as_unraisable("closing an engine at exit");  // the others still want to be closed
            }
        }
    }));
}

// Called after each request's end, without the GIL: the main thread lets go of tensors as soon as it runs Python code, though no
// engine is called any more. At most one such call is waiting in a process.
void schedule_forget_ended() noexcept {
    static std::atomic<std::uint64_t> ended{0};    // requests of this process
    static std::atomic<std::uint64_t> waiting{0};  // the generation of the process, plus one: a forked child has none
    ended.fetch_add(1, std::memory_order_relaxed);
    const std::uint64_t here = process_generation() + 1;
    if (waiting.exchange(here) == here || !Py_IsInitialized()) return;
    const auto forget = [](void*) {
        waiting.store(0);
        try {
            const std::vector<Session*> sessions(live_sessions().begin(), live_sessions().end());
            for (Session* session : sessions)  // letting go may run Python code that ends one
                if (live_sessions().contains(session) && session->usable_here())
                    session->forget_ended(ended.load(std::memory_order_relaxed));
        } catch (const std::bad_alloc&) {  // they stay until another call
        }
        return 0;
    };
    if (Py_AddPendingCall(forget, nullptr) != 0) waiting.store(0);  // too many calls of others: the next end tries again
}

}  // namespace

File& OpenFile::get() const {
    if (generation != process_generation())
        throw std::runtime_error("'" + path + "' was opened by the parent process: open it again in the child");
    if (!file) throw value_error("the file is closed");
    return *file;
}

Session::Session(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {
    register_exit_hook();
    engine_->on_request_end(&schedule_forget_ended);
    live_sessions().insert(this);
}

Session::Session(const EngineOptions& options) : Session([&] {
    nb::gil_scoped_release release;
    return std::make_unique<Engine>(options);
}()) {}

Session::~Session() {
    live_sessions().erase(this);
    if (engine_->usable_here() && !given_up_) {
        {
            nb::gil_scoped_release release;
            engine_->close();
        }
        return;
    }
    // The child of a fork has the parent's locks in whatever state they were in, and none of its threads: nothing here can be
    // waited for or taken down. Nor where that was given up: engine, requests and their tensors stay as long as the process.
    for (auto& pending : pending_) new std::shared_ptr<Pending>(std::move(pending));
    new std::shared_ptr<Engine>(std::move(engine_));
}

// Remembers what the request needs before it begins: nothing that fails can come between the two.
template <typename Submit>
std::shared_ptr<Pending> Session::remember(std::shared_ptr<Pending> pending, Submit submit) {
    pending->engine = engine_;
    pending_.push_back(pending);
    try {
        std::shared_ptr<Request> request;
        {
            nb::gil_scoped_release release;
            request = submit();
        }
        pending->request = std::move(request);
    } catch (...) {
        std::erase(pending_, pending);
        throw;
    }
    forget_ended();
    return pending;
}

std::shared_ptr<Pending> Session::transfer(Direction direction, nb::handle tensor, nb::handle target, std::int64_t offset,
                                           bool validate) {
    engine_->check_usable();
    const TensorMemory memory = memory_of(tensor, direction);
    const SharedFile shared = target_of(target);
    // Devices' memory is compared with the file by way of torch, which needs a tensor.
    const nb::object owner = validate && memory.device ? bytes_of(memory.tensor) : memory.storage;
    return remember(std::make_shared<Pending>(owner, shared.path, validate), [&] {
        const auto& [file, path, by_path] = shared;
        if (direction == Direction::read)
            return file ? engine_->read(memory.data, memory.nbytes, file, offset, memory.device)
                        : engine_->read(memory.data, memory.nbytes, path, offset, memory.device);
        return file ? engine_->write(memory.data, memory.nbytes, file, offset, memory.device)
                    : engine_->write(memory.data, memory.nbytes, path, offset, memory.device);
    });
}

std::shared_ptr<Pending> Session::write_descriptor(nb::handle tensor, int fd, std::int64_t offset) {
    engine_->check_usable();
    const TensorMemory memory = memory_of(tensor, Direction::write);
    return remember(std::make_shared<Pending>(memory.storage),
                    [&] { return engine_->write(memory.data, memory.nbytes, fd, offset, memory.device); });
}

std::shared_ptr<Pending> Session::sync(nb::handle target) {
    engine_->check_usable();
    const SharedFile shared = target_of(target);
    return remember(std::make_shared<Pending>(nb::none()),
                    [&] { return shared.file ? engine_->sync(shared.file) : engine_->sync(shared.path); });
}

// Like remember(). What was begun before an error is cancelled and waited for.
template <typename Transfers>
std::shared_ptr<Pending> Session::start_many(Transfers transfers) {
    auto many = std::make_unique<ManyParts>();
    auto pending = std::make_shared<Pending>(transfers.owner());
    pending->engine = engine_;
    pending_.push_back(pending);
    std::exception_ptr error;
    try {
        transfers.start(*engine_, *many);
    } catch (...) {
        error = std::current_exception();
    }
    pending->many = std::move(many);
    if (error) {
        pending->cancel();
        pending->wait_for(std::nullopt);
        pending->release_memory();
        std::rethrow_exception(error);
    }
    forget_ended();
    return pending;
}

std::shared_ptr<Pending> Session::transfer_many(Direction direction, nb::handle tensors, nb::handle targets, nb::handle offsets) {
    engine_->check_usable();
    return start_many(ManyTransfers(direction, tensors, targets, offsets));
}

std::shared_ptr<Pending> Session::transfer_records(Direction direction, nb::handle file, nb::handle ids, nb::handle rows,
                                                   nb::handle record_size, std::int64_t base) {
    engine_->check_usable();
    return start_many(RecordTransfers(direction, file, ids, rows, record_size, base));
}

void Session::forget_ended(std::uint64_t ended_so_far) {
    // Taken out before any tensor is let go, which may run Python code that comes back here.
    std::vector<std::shared_ptr<Pending>> ended;
    while (!pending_.empty() && has_ended(*pending_.front())) {
        ended.push_back(std::move(pending_.front()));
        pending_.pop_front();
    }
    // Seldom: a look at many pending requests takes milliseconds.
    if (ended_so_far > ended_at_last_full_scan_ + pending_.size() / 8) {
        ended_at_last_full_scan_ = ended_so_far;
        ended.reserve(ended.size() + pending_.size());  // nothing may be thrown while they are sorted out
        std::erase_if(pending_, [&](std::shared_ptr<Pending>& pending) {
            return has_ended(*pending) && (ended.push_back(std::move(pending)), true);
        });
    }
    for (auto& pending : ended)
        if (!pending->validate) pending->release_memory();
}

std::size_t Session::cancel() {
    check_process();
    const std::vector<std::shared_ptr<Pending>> pending(pending_.begin(), pending_.end());
    std::size_t cancelled = 0;
    for (const auto& each : pending) cancelled += each->submitted() && each->cancel();
    return cancelled;
}

bool Session::close(std::optional<std::chrono::nanoseconds> timeout) {
    using Clock = std::chrono::steady_clock;
    check_process();
    const auto begin = Clock::now();
    // Here rather than in the engine, so that Ctrl-C is heard; the newest first, since by its end most others will have ended.
    const std::vector<std::shared_ptr<Pending>> pending(pending_.rbegin(), pending_.rend());
    for (const auto& each : pending) {
        if (!each->submitted()) continue;
        if (!each->wait_for(timeout ? std::optional(*timeout - (Clock::now() - begin)) : std::nullopt)) return false;
    }
    // What other threads are just submitting, too. They may drop this session while it waits without the GIL.
    const auto engine = engine_;
    for (bool idle = false; !idle;) {
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        std::chrono::nanoseconds slice = kLookForSignals;
        if (timeout) slice = std::min<std::chrono::nanoseconds>(slice, *timeout - (Clock::now() - begin));
        nb::gil_scoped_release release;
        idle = engine->wait_until_idle(std::max(slice, std::chrono::nanoseconds(0)));
        if (!idle && timeout && Clock::now() - begin >= *timeout) return false;
    }
    {
        nb::gil_scoped_release release;
        engine->close();
    }
    if (live_sessions().contains(this)) forget_ended();
    return true;
}

void Session::close_at_exit() {
    if (!engine_->usable_here()) return;
    try {
        if (close(kPatienceAtExit)) return;
        warn_at_exit("deepnvme: waiting at exit for " + describe_pending() + "; Ctrl-C ends the process without waiting\n");
        close(std::nullopt);
    } catch (nb::python_error& error) {
        if (!error.matches(PyExc_KeyboardInterrupt)) throw;
        given_up_ = true;
        Py_AtExit(&end_by_interrupt);
    }
}

std::string Session::describe_pending() const {
    std::size_t count = 0;
    std::string oldest;
    const std::vector<std::shared_ptr<Pending>> all(pending_.begin(), pending_.end());
    for (const auto& pending : all) {
        if (!pending->submitted() || pending->done()) continue;
        if (oldest.empty()) oldest = pending->describe_unfinished();
        ++count;
    }
    return std::to_string(count) + (count == 1 ? " transfer: " : " transfers, the oldest: ") + oldest;
}

void Session::check_process() const {
    if (!engine_->usable_here()) engine_->check_usable();
}

Engine& Session::engine() const {
    check_process();
    return *engine_;
}

std::shared_ptr<Engine> Session::shared_engine() const {
    check_process();
    return engine_;
}

nb::dict Session::stats() const {
    const Statistics now = engine().statistics();
    nb::dict stats;
    stats["backend"] = engine_->backend();
    stats["requests"] = now.requests;
    stats["failed_requests"] = now.failed_requests;
    stats["bytes_read"] = now.bytes_read;
    stats["bytes_written"] = now.bytes_written;
    stats["bytes_direct"] = now.bytes_zero_copy + now.bytes_staged + now.bytes_gds;
    stats["bytes_zero_copy"] = now.bytes_zero_copy;
    stats["bytes_staged"] = now.bytes_staged;
    stats["bytes_buffered"] = now.bytes_buffered;
    stats["bytes_gds"] = now.bytes_gds;
    stats["blocks"] = now.blocks;
    nb::dict block_latency;
    for (std::size_t bin = 0; bin < kLatencyBins; ++bin)
        if (now.block_latency[bin] > 0) block_latency[nb::int_(longest_in_bin(bin))] = now.block_latency[bin];
    stats["block_latency"] = block_latency;
    stats["short_transfers"] = now.short_transfers;
    stats["retries"] = now.retries;
    nb::dict fallbacks;
    for (const auto& [reason, count] : now.fallbacks) fallbacks[decoded(reason)] = count;
    stats["fallbacks"] = fallbacks;
    return stats;
}

}  // namespace deepnvme::bindings
