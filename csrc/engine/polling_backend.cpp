// io_uring with completions that the drive is asked for, in place of interrupts (IORING_SETUP_IOPOLL).
//
// A ring that polls takes direct reads and writes of drives with poll queues, and nothing else: no fsync, no transfer by the
// page cache, no cancel, and no poll of an eventfd, by which a worker is woken. So there is an ordinary ring beside it. While
// something is polled for, the thread asks both in turn and never sleeps; else it sleeps as with the ordinary ring alone.
//
// The kernel could also be asked to return only when something has completed. But then completions and wakes of the ordinary ring
// would go unseen until then, and so would a block that is queued meanwhile.
#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/error.h"
#include "core/poll_queues.h"
#include "engine/uring_backend.h"

namespace deepnvme {

namespace {

// True if unknown: the kernel then refuses the transfer itself, or (Linux 6.1) polls in vain until the drive interrupts.
bool may_be_polled(int fd) noexcept {
    struct stat status;
    if (::fstat(fd, &status) != 0) return true;
    try {
        return may_have_poll_queues(S_ISBLK(status.st_mode) ? status.st_rdev : status.st_dev);
    } catch (const std::bad_alloc&) {
        return true;
    }
}

class PollingBackend final : public Backend {
public:
    explicit PollingBackend(unsigned capacity)
        : ordinary_(capacity, /*defer=*/false), polled_ring_(capacity, /*defer=*/false, /*polled=*/true) {
        refused_.reserve(capacity);  // so that nothing is allocated while operations are under way
    }

    std::string_view name() const noexcept override { return "io_uring"; }

    std::size_t submit(std::span<Operation* const> operations) override {
        std::size_t taken = 0;
        for (Operation* const& operation : operations) {
            if (!(operation->polled ? queue_polled(*operation) : ordinary_.submit(std::span(&operation, 1)) == 1)) break;
            ++taken;
        }
        return taken;
    }

    void flush() override {
        ordinary_.flush();
        submit_and_poll();
    }

    std::size_t reap(std::span<Completion> completions) override {
        if (!refused_.empty()) return take_refused(completions);
        if (polled_in_flight_ == 0) return ordinary_.reap(completions);
        while (true) {
            ordinary_.flush();  // also listens for wake()
            submit_and_poll();
            std::size_t count = collect(completions);
            const bool ready = count < completions.size() && ordinary_.ready();
            if (ready) count += ordinary_.reap(completions.subspan(count));
            if (count > 0 || ready) return count;
            if (polled_ring_.error()) throw IoError(polled_ring_.error(), "io_uring_enter of a polled ring", "");
        }
    }

    // The kernel has no cancel for what is polled for: the drive finishes it.
    bool cancel(Operation& operation) noexcept override { return operation.polled || ordinary_.cancel(operation); }

    bool stop() noexcept override {
        const bool ordinary_stopped = ordinary_.stop();
        polled_ring_.forget_error();
        std::array<Completion, 16> ended;
        while (polled_in_flight_ > 0 && polled_ring_.error() == 0) {
            submit_and_poll();
            collect(ended);
        }
        return ordinary_stopped && polled_in_flight_ == 0;
    }

    void wake() noexcept override { ordinary_.wake(); }

private:
    // False if the submission queue is full.
    bool queue_polled(Operation& operation) noexcept {
        if (!drive_may_poll_) drive_may_poll_ = may_be_polled(operation.fd);
        if (!*drive_may_poll_) {
            refused_.push_back(&operation);
            return true;
        }
        io_uring::SubmissionEntry* next = polled_ring_.next_entry();
        if (!next) return false;
        prepare(*next, operation);
        next->user_data = reinterpret_cast<std::uintptr_t>(&operation);
        ++polled_in_flight_;
        return true;
    }

    std::size_t take_refused(std::span<Completion> completions) noexcept {
        std::size_t count = 0;
        for (; count < completions.size() && !refused_.empty(); refused_.pop_back())
            completions[count++] = {refused_.back(), -EOPNOTSUPP};
        return count;
    }

    // Submit what was queued, and poll the drive once. Does not block.
    void submit_and_poll() noexcept {
        if (polled_in_flight_ == 0) return;
        polled_ring_.submit(0, /*get_events=*/true);
    }

    std::size_t collect(std::span<Completion> completions) noexcept {
        std::size_t count = 0;
        polled_ring_.collect([&](const io_uring::CompletionEntry& ended) {
            if (count == completions.size()) return false;
            completions[count++] = {reinterpret_cast<Operation*>(static_cast<std::uintptr_t>(ended.user_data)), ended.result};
            return true;
        });
        polled_in_flight_ -= count;
        return count;
    }

    UringBackend ordinary_;
    Ring polled_ring_;
    std::size_t polled_in_flight_ = 0;  // operations queued or submitted to the polled ring
    // Whether the first operation's drive may have poll queues. A backend serves one drive, unless an engine has more than
    // kMostDrives (engine.cpp): the others then share this answer.
    std::optional<bool> drive_may_poll_;
    std::vector<Operation*> refused_;
};

}  // namespace

std::unique_ptr<Backend> make_polling_backend(unsigned capacity) { return std::make_unique<PollingBackend>(capacity); }

}  // namespace deepnvme
