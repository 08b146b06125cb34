// io_uring through liburing.
#include "engine/backend.h"

#ifdef DEEPNVME_HAVE_LIBURING

#include <liburing.h>
#include <poll.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <optional>
#include <thread>

#include "core/error.h"
#include "core/wake_event.h"

namespace deepnvme {

namespace {

class Ring {
public:
    explicit Ring(unsigned entries) {
        unsigned flags = 0;
#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_DEFER_TASKRUN)
        // One thread submits and reaps, so completions need not interrupt it (Linux 6.1; older kernels say EINVAL).
        flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
#endif
        int error = -::io_uring_queue_init(entries, &ring_, flags);
        if (error == EINVAL && flags) error = -::io_uring_queue_init(entries, &ring_, 0);
        if (error) throw IoError(error, "io_uring_setup", "");
        // The rings are shared memory: a forked child must not be able to disturb its parent's.
        ::io_uring_ring_dontfork(&ring_);
    }
    ~Ring() { ::io_uring_queue_exit(&ring_); }
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    io_uring* get() noexcept { return &ring_; }

private:
    io_uring ring_;
};

class UringBackend final : public Backend {
public:
    // One entry more than operations: the poll that listens for wake().
    explicit UringBackend(unsigned capacity) : ring_(capacity + 1) {
        require_operations();
        listen();
        // An older kernel, or a filter, may allow the set-up and refuse the rest.
        const int submitted = ::io_uring_submit(ring_.get());
        if (submitted < 0) throw IoError(-submitted, "io_uring_enter", "");
        io_uring_cqe* cqe = nullptr;
        if (::io_uring_peek_cqe(ring_.get(), &cqe) == 0 && cqe->res < 0) throw IoError(-cqe->res, "io_uring poll", "");
    }

    std::string_view name() const noexcept override { return "io_uring"; }

    std::size_t submit(std::span<Operation* const> operations) override {
        std::size_t taken = 0;
        for (Operation* operation : operations) {
            io_uring_sqe* sqe = ::io_uring_get_sqe(ring_.get());
            if (!sqe) break;
            prepare(sqe, *operation);
            ++taken;
        }
        under_way_ += taken;
        // What the kernel leaves in the ring just now (EAGAIN, EBUSY) goes out with the next call, at the latest from reap.
        const int submitted = ::io_uring_submit(ring_.get());
        if (submitted < 0 && !is_passing(-submitted)) throw IoError(-submitted, "io_uring_enter", "");
        return taken;
    }

    std::size_t reap(std::span<Completion> completions) override {
        const Reaped reaped = wait(completions);
        if (reaped.entered < 0 && !is_passing(-reaped.entered)) throw IoError(-reaped.entered, "io_uring_enter", "");
        if (reaped.poll && *reaped.poll < 0) throw IoError(-*reaped.poll, "io_uring poll", "");
        if (reaped.poll) {
            event_.clear();
            listen();  // goes out with the next submission
        }
        return reaped.count;
    }

    void stop() noexcept override {
        std::array<Completion, 16> ended;
        while (under_way_ > 0) {
            const int entered = wait(ended).entered;
            if (entered < 0 && !is_passing(-entered)) return;  // the ring itself is lost
        }
    }

    void wake() noexcept override { event_.signal(); }

private:
    struct Reaped {
        int entered;                             // what io_uring_enter returned
        std::size_t count = 0;                   // operations
        std::optional<int> poll = std::nullopt;  // the result of the poll that listens for wake(), if it has ended
    };

    // Block as reap does. All that is taken from the ring is accounted for, whatever went wrong.
    Reaped wait(std::span<Completion> completions) {
        Reaped reaped{::io_uring_submit_and_wait(ring_.get(), 1)};
        unsigned head, seen = 0;
        io_uring_cqe* cqe;
        io_uring_for_each_cqe(ring_.get(), head, cqe) {
            auto* operation = static_cast<Operation*>(::io_uring_cqe_get_data(cqe));
            if (operation && reaped.count == completions.size()) break;
            if (operation) completions[reaped.count++] = {operation, cqe->res};
            else reaped.poll = cqe->res;
            ++seen;
        }
        ::io_uring_cq_advance(ring_.get(), seen);
        under_way_ -= reaped.count;
        // The kernel is short of memory and nothing is under way that would end the shortage: don't spin on it.
        if (reaped.entered < 0 && reaped.entered != -EINTR && seen == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
        return reaped;
    }

    // Linux 5.1 has io_uring, 5.6 the reads and writes used here.
    void require_operations() {
        io_uring_probe* probe = ::io_uring_get_probe_ring(ring_.get());
        const bool has_all = probe && ::io_uring_opcode_supported(probe, IORING_OP_READ) &&
                             ::io_uring_opcode_supported(probe, IORING_OP_WRITE) && ::io_uring_opcode_supported(probe, IORING_OP_FSYNC);
        ::io_uring_free_probe(probe);
        if (!has_all) throw IoError(EOPNOTSUPP, "io_uring read and write (Linux 5.6 has them)", "");
    }

    static bool is_passing(int error) { return error == EINTR || error == EAGAIN || error == EBUSY; }

    static void prepare(io_uring_sqe* sqe, Operation& operation) {
        switch (operation.kind) {
            case Operation::Kind::read:
                ::io_uring_prep_read(sqe, operation.fd, operation.memory, operation.length, operation.offset);
                break;
            case Operation::Kind::write:
                ::io_uring_prep_write(sqe, operation.fd, operation.memory, operation.length, operation.offset);
                break;
            case Operation::Kind::sync: ::io_uring_prep_fsync(sqe, operation.fd, 0); break;
        }
        ::io_uring_sqe_set_data(sqe, &operation);
    }

    void listen() {
        // Never full: there is an entry for the poll beside those for all operations, and submit leaves none behind for long.
        io_uring_sqe* sqe = ::io_uring_get_sqe(ring_.get());
        if (!sqe) {
            ::io_uring_submit(ring_.get());
            sqe = ::io_uring_get_sqe(ring_.get());
        }
        if (!sqe) throw IoError(EBUSY, "io_uring submission", "");
        ::io_uring_prep_poll_add(sqe, event_.fd(), POLLIN);
        ::io_uring_sqe_set_data(sqe, nullptr);
    }

    std::size_t under_way_ = 0;
    WakeEvent event_;
    Ring ring_;
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(unsigned capacity) { return std::make_unique<UringBackend>(capacity); }

}  // namespace deepnvme

#endif
