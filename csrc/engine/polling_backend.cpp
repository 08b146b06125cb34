// io_uring with completions that the drive is asked for, in place of interrupts (IORING_SETUP_IOPOLL).
//
// A ring that polls takes direct reads and writes of drives with poll queues, and nothing else: no fsync, no transfer by the
// page cache, no cancel, and no poll of an eventfd, by which a worker is woken. So there is an ordinary ring beside it. While
// something is polled for, the thread asks both in turn and never sleeps; else it sleeps as with the ordinary ring alone.
//
// The kernel could also be asked to return only when something has completed. But then it would not look at the ordinary ring
// meanwhile: a block that is queued while another is under way would wait for that one's end.
#ifdef DEEPNVME_HAVE_LIBURING

#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/poll_queues.h"
#include "engine/uring_backend.h"

namespace deepnvme {

namespace {

// True where it is not known: then the kernel says so, or does not.
bool drive_has_poll_queues(int fd) noexcept {
    struct stat status;
    if (::fstat(fd, &status) != 0) return true;
    try {
        return has_poll_queues(S_ISBLK(status.st_mode) ? status.st_rdev : status.st_dev);
    } catch (const std::bad_alloc&) {
        return true;
    }
}

class PollingBackend final : public Backend {
public:
    explicit PollingBackend(unsigned capacity) : ordinary_(capacity), ring_(capacity, IORING_SETUP_IOPOLL) {
        refused_.reserve(capacity);  // so that nothing is allocated while operations are under way
    }

    std::string_view name() const noexcept override { return "io_uring"; }

    std::size_t submit(std::span<Operation* const> operations) override {
        std::size_t taken = 0;
        for (Operation* const& operation : operations) {
            if (!(operation->polled ? take(*operation) : ordinary_.submit(std::span(&operation, 1)) == 1)) break;
            ++taken;
        }
        return taken;
    }

    void flush() override {
        ordinary_.flush();
        enter();
    }

    std::size_t reap(std::span<Completion> completions) override {
        if (!refused_.empty()) return take_refused(completions);
        if (polled_ == 0) return ordinary_.reap(completions);
        while (true) {
            ordinary_.flush();  // also listens for wake()
            enter();
            std::size_t count = collect(completions);
            const bool ready = count < completions.size() && ordinary_.ready();
            if (ready) count += ordinary_.reap(completions.subspan(count));
            if (count > 0 || ready) return count;
            if (enter_error_) throw IoError(enter_error_, "io_uring_enter of a polled ring", "");
        }
    }

    // The kernel has no cancel for what is polled for: the drive finishes it.
    bool cancel(Operation& operation) noexcept override { return operation.polled || ordinary_.cancel(operation); }

    bool stop() noexcept override {
        enter_error_ = 0;
        std::array<Completion, 16> ended;
        while (polled_ > 0 && enter_error_ == 0) {
            enter();
            collect(ended);
        }
        return ordinary_.stop() && polled_ == 0;
    }

    void wake() noexcept override { ordinary_.wake(); }

private:
    // False while the kernel takes nothing.
    bool take(Operation& operation) noexcept {
        // Newer kernels refuse this themselves. Linux 6.1 polled in vain, until the drive interrupted.
        if (!has_poll_queues_) has_poll_queues_ = drive_has_poll_queues(operation.fd);
        if (!*has_poll_queues_) {
            refused_.push_back(&operation);
            return true;
        }
        io_uring_sqe* sqe = ::io_uring_get_sqe(ring_.get());
        if (!sqe) return false;
        prepare(sqe, operation);
        sqe->user_data = reinterpret_cast<std::uintptr_t>(&operation);
        ++polled_;
        return true;
    }

    std::size_t take_refused(std::span<Completion> completions) noexcept {
        std::size_t count = 0;
        for (; count < completions.size() && !refused_.empty(); refused_.pop_back())
            completions[count++] = {refused_.back(), -EOPNOTSUPP};
        return count;
    }

    // Start what was taken, and have the kernel look once for completions.
    void enter() noexcept {
        if (polled_ == 0) return;
        const int entered = ::io_uring_submit(ring_.get());
        if (entered < 0 && !Ring::is_passing(-entered)) enter_error_ = -entered;
    }

    std::size_t collect(std::span<Completion> completions) noexcept {
        std::size_t count = 0;
        unsigned head;
        io_uring_cqe* cqe;
        io_uring_for_each_cqe(ring_.get(), head, cqe) {
            if (count == completions.size()) break;
            completions[count++] = {reinterpret_cast<Operation*>(static_cast<std::uintptr_t>(cqe->user_data)), cqe->res};
        }
        ::io_uring_cq_advance(ring_.get(), static_cast<unsigned>(count));
        polled_ -= count;
        return count;
    }

    UringBackend ordinary_;
    Ring ring_;
    std::size_t polled_ = 0;  // operations that the polled ring has
    std::optional<bool> has_poll_queues_;  // the drive of the first operation to be polled; a worker has but one
    std::vector<Operation*> refused_;
    int enter_error_ = 0;
};

}  // namespace

std::unique_ptr<Backend> make_polling_backend(unsigned capacity) { return std::make_unique<PollingBackend>(capacity); }

}  // namespace deepnvme

#endif
