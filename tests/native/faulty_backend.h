// A backend that fails on command, around a real one.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "core/error.h"
#include "engine/backend.h"

namespace deepnvme::testing {

// Every Nth operation, counted from the first; zero means never.
struct Faults {
    unsigned short_every = 0;       // reports at most short_bytes; of a read, what was not reported is not there
    unsigned short_bytes = 512;
    unsigned error_every = 0;       // completes with `error` without being tried
    int error = EIO;
    unsigned error_limit = 0;       // how many errors in all; zero means no limit
    unsigned long error_from = 0;   // only operations that begin at this byte of their file, or behind it
    unsigned refuse_every = 0;      // submit takes none of what it is given (EAGAIN)
    bool refuse_direct = false;     // EINVAL for descriptors with O_DIRECT
    unsigned break_after = 0;       // reap throws once this many operations have been submitted
    unsigned break_submit_after = 0;   // so does submit, the last of them having been taken
    unsigned out_of_memory_every = 0;  // of the calls of submit and reap: throws std::bad_alloc, before anything has begun
    unsigned break_first = 0;       // how many backends break, of those made first; zero means all
    unsigned most_backends = 0;     // making another fails; zero means no limit
    bool stop_fails = false;        // stop says so, though it has waited
    unsigned refuse_cancels = 0;    // how many cancels it turns away, the first ones
};

// What a backend was asked and what it answered, in order.
class Journal {
public:
    struct Entry {
        bool completed;  // else submitted
        Operation::Kind kind;
        std::uint64_t offset;
        std::uint32_t length;
        std::int64_t result;  // of a completion
    };

    void note(const Entry& entry) {
        std::lock_guard lock(mutex_);
        entries_.push_back(entry);
    }
    std::vector<Entry> entries() const {
        std::lock_guard lock(mutex_);
        return entries_;
    }

private:
    mutable std::mutex mutex_;
    std::vector<Entry> entries_;
};

// True holds every backend made with it back from reporting completions, but those of operations that are cancelled.
using Hold = std::shared_ptr<std::atomic<bool>>;

class FaultyBackend final : public Backend {
public:
    // `held` and `journal` may be null.
    FaultyBackend(std::unique_ptr<Backend> inner, Faults faults, Hold held, std::shared_ptr<Journal> journal)
        : inner_(std::move(inner)), faults_(faults), held_(std::move(held)), journal_(std::move(journal)) {}

    std::string_view name() const noexcept override { return inner_->name(); }

    std::size_t submit(std::span<Operation* const> operations) override {
        allocate();
        if (faults_.break_submit_after && count_ >= faults_.break_submit_after) throw IoError(EBADF, "a broken backend", "");
        if (faults_.refuse_every && ++offers_ % faults_.refuse_every == 0) return 0;
        std::size_t taken = 0;
        for (Operation* operation : operations) {
            ++count_;
            if (const int error = error_for(*operation)) {
                made_up_.push_back({operation, -error});
                note(*operation, false, 0);
                ++taken;
                continue;
            }
            const bool shorten = faults_.short_every && count_ % faults_.short_every == 0 &&
                                 operation->kind != Operation::Kind::sync && operation->length > faults_.short_bytes;
            if (shorten) {
                lengths_[operation] = operation->length;
                operation->length = std::min(shortened(*operation), operation->length);
            }
            if (inner_->submit(std::span(&operation, 1)) == 0) {
                restore(operation);
                break;
            }
            note(*operation, false, 0);
            ++taken;
        }
        return taken;
    }

    void flush() override { inner_->flush(); }

    std::size_t reap(std::span<Completion> completions) override {
        allocate();
        if (faults_.break_after && count_ >= faults_.break_after) throw IoError(EBADF, "a broken backend", "");
        if (withheld_.empty() || !all_withheld(cancelled_)) gather(completions.size());
        while (held() && cancelled_.empty() && !withheld_.empty()) {
            if (woken_.exchange(false)) return 0;
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
        const bool all = !held();
        std::size_t count = 0;
        std::erase_if(withheld_, [&](const Completion& completion) {
            if (count == completions.size()) return false;
            const bool cancelled = std::erase(cancelled_, completion.operation) > 0;
            if (!all && !cancelled) return false;
            completions[count++] = {completion.operation, cancelled ? -ECANCELED : completion.result};
            return true;
        });
        for (std::size_t i = 0; i < count; ++i) note(*completions[i].operation, true, completions[i].result);
        return count;
    }

    // What is held back ends with -ECANCELED, whether or not it has been done.
    bool cancel(Operation& operation) noexcept override {
        if (cancels_++ < faults_.refuse_cancels) return false;
        if (held()) cancelled_.push_back(&operation);
        return inner_->cancel(operation);
    }

    bool stop() noexcept override { return inner_->stop() && !faults_.stop_fails; }

    void wake() noexcept override {
        woken_.store(true);
        inner_->wake();
    }

private:
    void allocate() {
        if (faults_.out_of_memory_every && ++allocations_ % faults_.out_of_memory_every == 0) throw std::bad_alloc();
    }

    bool held() const noexcept { return held_ && held_->load(); }

    bool all_withheld(const std::vector<Operation*>& operations) const {
        return std::all_of(operations.begin(), operations.end(), [this](const Operation* operation) {
            const auto is_it = [&](const Completion& each) { return each.operation == operation; };
            return std::any_of(withheld_.begin(), withheld_.end(), is_it);
        });
    }

    // What has ended, or else what ends next.
    void gather(std::size_t most) {
        if (made_up_.empty()) {
            woken_.store(false);
            made_up_.resize(most);
            made_up_.resize(inner_->reap(made_up_));
            for (Completion& completion : made_up_) cut_short(completion);
        }
        withheld_.insert(withheld_.end(), made_up_.begin(), made_up_.end());
        made_up_.clear();
    }

    int error_for(const Operation& operation) {
        if (faults_.refuse_direct && (::fcntl(operation.fd, F_GETFL) & O_DIRECT)) return EINVAL;
        if (!faults_.error_every || count_ % faults_.error_every != 0 || operation.offset < faults_.error_from) return 0;
        if (faults_.error_limit && errors_ >= faults_.error_limit) return 0;
        ++errors_;
        return faults_.error;
    }

    // What the system is asked for instead. A direct transfer has to stay aligned, whatever is reported of it afterwards.
    std::uint32_t shortened(const Operation& operation) const {
        constexpr std::uint32_t kSafe = 4096;
        if (!(::fcntl(operation.fd, F_GETFL) & O_DIRECT)) return faults_.short_bytes;
        return (faults_.short_bytes + kSafe - 1) / kSafe * kSafe;
    }

    void cut_short(Completion& completion) {
        if (!restore(completion.operation) || completion.result <= static_cast<std::int64_t>(faults_.short_bytes)) return;
        const auto moved = static_cast<std::size_t>(completion.result);
        completion.result = faults_.short_bytes;
        if (completion.operation->kind == Operation::Kind::read)
            std::memset(completion.operation->memory + faults_.short_bytes, 0xDD, moved - faults_.short_bytes);
    }

    bool restore(Operation* operation) {
        const auto found = lengths_.find(operation);
        if (found == lengths_.end()) return false;
        operation->length = found->second;
        lengths_.erase(found);
        return true;
    }

    void note(const Operation& operation, bool completed, std::int64_t result) {
        if (journal_) journal_->note({completed, operation.kind, operation.offset, operation.length, result});
    }

    std::unique_ptr<Backend> inner_;
    Faults faults_;
    Hold held_;
    std::shared_ptr<Journal> journal_;
    unsigned long count_ = 0;
    unsigned long offers_ = 0;
    unsigned long allocations_ = 0;
    unsigned long errors_ = 0;
    unsigned long cancels_ = 0;
    std::vector<Completion> made_up_;
    std::vector<Completion> withheld_;      // ended, not yet reported
    std::vector<Operation*> cancelled_;     // while held back, and not yet reported
    std::atomic<bool> woken_{false};
    std::map<Operation*, std::uint32_t> lengths_;
};

// Completes everything at once and moves nothing: what is left is the engine's own cost. Optionally holds everything back until
// released, so that requests pile up.
class InstantBackend final : public Backend {
public:
    InstantBackend(Hold held, unsigned capacity) : held_(std::move(held)) { done_.reserve(capacity); }

    std::string_view name() const noexcept override { return "instant"; }

    std::size_t submit(std::span<Operation* const> operations) override {
        for (Operation* operation : operations) done_.push_back({operation, operation->length});
        return operations.size();
    }

    void flush() override {}

    std::size_t reap(std::span<Completion> completions) override {
        held_->wait(true);
        if (done_.empty()) {
            woken_.wait(false);
            woken_.store(false);
            return 0;
        }
        const std::size_t count = std::min(done_.size(), completions.size());
        std::copy(done_.end() - static_cast<std::ptrdiff_t>(count), done_.end(), completions.begin());
        done_.resize(done_.size() - count);
        return count;
    }

    bool cancel(Operation&) noexcept override { return true; }  // all has ended

    bool stop() noexcept override { return true; }

    void wake() noexcept override {
        woken_.store(true);
        woken_.notify_all();
    }

private:
    Hold held_;
    std::atomic<bool> woken_{false};
    std::vector<Completion> done_;
};

}  // namespace deepnvme::testing
