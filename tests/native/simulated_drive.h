// Drives that exist on paper: operations complete when a drive of a given bandwidth, IOPS and latency would complete them. No
// byte is moved, so that a small machine shows what the engine does for drives that it does not have.
#pragma once

#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/backend.h"

namespace deepnvme::testing {

struct DriveModel {
    double bytes_per_second;
    double operations_per_second;
    double latency;  // seconds, of an operation that finds the drive idle, beside its share of bandwidth or IOPS
    unsigned coalesced = 1;  // completions that a sleeper is woken for, or as many as there are operations under way
};

// When operations complete: one is served after the other, each for the time that bandwidth or IOPS allow, whichever is longer,
// and is reported a constant latency later. Reads no clock, so that a test can give any time. Thread-safe.
class DriveClock {
public:
    using Time = std::int64_t;  // picoseconds: an operation of 400 ns must not be rounded to 1 %
    static constexpr double kSecond = 1e12;

    explicit DriveClock(DriveModel model) noexcept
        : per_byte_(kSecond / model.bytes_per_second),
          per_operation_(kSecond / model.operations_per_second),
          latency_(static_cast<Time>(kSecond * model.latency)) {}

    // When an operation that is submitted at `now` completes; `slower`: how many times as long everything takes.
    Time completion(Time now, std::uint64_t bytes, unsigned slower = 1) noexcept {
        const auto service = static_cast<Time>(std::max(per_operation_, per_byte_ * static_cast<double>(bytes))) * slower;
        Time free = next_free_.load(std::memory_order_relaxed);
        Time end;
        do end = std::max(now, free) + service;
        while (!next_free_.compare_exchange_weak(free, end, std::memory_order_relaxed));
        return end + latency_ * slower;
    }

private:
    const double per_byte_;
    const double per_operation_;
    const Time latency_;
    std::atomic<Time> next_free_{0};
};

// A drive that any number of backends, each of another worker, submit to.
class SimulatedDrive {
public:
    enum class State {
        healthy,
        slow,       // everything submitted now takes 100 times as long
        failing,    // every operation takes its time, then fails with EIO
        hanging,    // nothing completes, until the state changes
        unplugged,  // everything fails with ENODEV at once, also what is under way
    };

    explicit SimulatedDrive(DriveModel model) : coalesced_(std::max(model.coalesced, 1u)), clock_(model) {}

    State state() const noexcept { return state_.load(std::memory_order_acquire); }
    // Any thread; backends that sleep hear of it.
    void become(State state) {
        std::lock_guard lock(mutex_);
        state_.store(state, std::memory_order_release);
        for (Backend* backend : backends_) backend->wake();
    }

    // What operations that succeeded had to move so far, in bytes, and how many operations completed, well or not.
    std::uint64_t bytes() const noexcept { return bytes_.load(std::memory_order_relaxed); }
    std::uint64_t operations() const noexcept { return operations_.load(std::memory_order_relaxed); }

private:
    friend class SimulatedBackend;

    DriveClock::Time now() const noexcept {
        return std::chrono::nanoseconds(std::chrono::steady_clock::now() - made_).count() * 1000;
    }
    void add(Backend* backend) {
        std::lock_guard lock(mutex_);
        backends_.push_back(backend);
    }
    void remove(Backend* backend) {
        std::lock_guard lock(mutex_);
        std::erase(backends_, backend);
    }

    const std::size_t coalesced_;
    const std::chrono::steady_clock::time_point made_ = std::chrono::steady_clock::now();
    DriveClock clock_;
    std::atomic<State> state_{State::healthy};
    std::atomic<std::uint64_t> bytes_{0};
    std::atomic<std::uint64_t> operations_{0};
    std::mutex mutex_;  // guards backends_
    std::vector<Backend*> backends_;
};

// One worker's way to a simulated drive. While nothing is due it sleeps, as a worker of a real drive does, and never spins: the
// cores are for the engine, and late completions only come in larger batches, since the drive's own clock has gone on.
class SimulatedBackend final : public Backend {
public:
    using State = SimulatedDrive::State;

    SimulatedBackend(std::shared_ptr<SimulatedDrive> drive, unsigned capacity) : drive_(std::move(drive)) {
        cancelled_.reserve(capacity);
        ::prctl(PR_SET_TIMERSLACK, 1ul);  // of this thread, the worker's: by default a sleep is up to 50 us too long
        drive_->add(this);
    }
    ~SimulatedBackend() override { drive_->remove(this); }

    std::string_view name() const noexcept override { return "simulated"; }

    std::size_t submit(std::span<Operation* const> operations) override {
        const auto now = drive_->now();
        const unsigned slower = drive_->state() == State::slow ? 100 : 1;
        for (Operation* operation : operations)
            under_way_.push_back({drive_->clock_.completion(now, operation->length, slower), operation});
        return operations.size();
    }

    void flush() override {}  // everything has started

    std::size_t reap(std::span<Completion> completions) override {
        const std::size_t count = poll(completions);
        if (count > 0) return count;
        const bool timed = !under_way_.empty() && drive_->state() != State::hanging;
        sleep(timed ? under_way_[std::min(drive_->coalesced_, under_way_.size()) - 1].due : kNever);
        return poll(completions);
    }

    // Like reap, but never waits.
    std::size_t poll(std::span<Completion> completions) {
        std::size_t count = 0;
        for (; !cancelled_.empty() && count < completions.size(); cancelled_.pop_back())
            completions[count++] = {cancelled_.back(), -ECANCELED};
        const State state = drive_->state();
        if (under_way_.empty() || state == State::hanging) return count;
        const auto now = drive_->now();
        std::uint64_t bytes = 0;
        // In the order of their submission, which is that of their ends.
        for (; count < completions.size() && !under_way_.empty(); under_way_.pop_front()) {
            if (under_way_.front().due > now && state != State::unplugged) break;
            Operation* operation = under_way_.front().operation;
            const auto length = static_cast<std::int64_t>(operation->length);
            const std::int64_t result = state == State::unplugged ? -ENODEV : state == State::failing ? -EIO : length;
            if (result > 0) bytes += operation->length;
            completions[count++] = {operation, result};
        }
        drive_->bytes_.fetch_add(bytes, std::memory_order_relaxed);
        drive_->operations_.fetch_add(count, std::memory_order_relaxed);
        return count;
    }

    // Also of a drive that hangs.
    bool cancel(Operation& operation) noexcept override {
        const auto found = std::ranges::find(under_way_, &operation, &UnderWay::operation);
        if (found == under_way_.end()) return true;
        under_way_.erase(found);
        cancelled_.push_back(&operation);
        return true;
    }

    bool stop() noexcept override { return true; }  // nothing uses memory

    void wake() noexcept override {
        woken_.store(1, std::memory_order_release);
        ::syscall(SYS_futex, &woken_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    }

private:
    struct UnderWay {
        DriveClock::Time due;
        Operation* operation;
    };
    static constexpr DriveClock::Time kNever = INT64_MAX;

    // Until `due` or a wake, which is used up.
    void sleep(DriveClock::Time due) {
        timespec until{};
        if (due != kNever) {
            // steady_clock is CLOCK_MONOTONIC, which this call takes its absolute times from.
            const auto at = std::chrono::nanoseconds(drive_->made_.time_since_epoch()).count() + (due + 999) / 1000;
            until = {static_cast<time_t>(at / 1'000'000'000), static_cast<long>(at % 1'000'000'000)};
        }
        if (woken_.load(std::memory_order_acquire) == 0)
            ::syscall(SYS_futex, &woken_, FUTEX_WAIT_BITSET_PRIVATE, 0, due == kNever ? nullptr : &until, nullptr,
                      FUTEX_BITSET_MATCH_ANY);
        woken_.store(0, std::memory_order_release);
    }

    static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));
    const std::shared_ptr<SimulatedDrive> drive_;
    std::atomic<std::uint32_t> woken_{0};
    std::deque<UnderWay> under_way_;
    std::vector<Operation*> cancelled_;  // not reaped; has room for all that can be under way
};

}  // namespace deepnvme::testing
