// Owns an io_uring instance. It is used by the thread that makes it, and may be destroyed by any.
#pragma once

#include <liburing.h>

#include <array>
#include <cerrno>
#include <thread>

#include "core/error.h"
#include "engine/backend.h"

namespace deepnvme {

class Ring {
public:
    // `defer`: whether completions may be held back until the thread waits for some. `extra_flags`: further set-up flags. Throws
    // IoError.
    explicit Ring(unsigned entries, bool defer = true, unsigned extra_flags = 0) {
        // One thread submits and reaps, so completions need not interrupt it: they come with its next system call, or when it
        // waits. The best first; a kernel says EINVAL to what it does not know. Why this order: docs/engine.md.
        constexpr std::array kSetUps{
            kDeferring,
#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_COOP_TASKRUN)
            IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN,  // Linux 6.0
#endif
#ifdef IORING_SETUP_COOP_TASKRUN
            IORING_SETUP_COOP_TASKRUN,  // Linux 5.19
#endif
            0u,
        };
        int error = 0;
        for (const unsigned flags : kSetUps) {
            if (flags == kDeferring && !defer) continue;
            error = -::io_uring_queue_init(entries, &ring_, flags | extra_flags);
            if (error != EINVAL) break;
        }
        if (error) throw IoError(error, "io_uring_setup", "");
        // The rings are shared memory: a forked child must not be able to disturb its parent's.
        ::io_uring_ring_dontfork(&ring_);
        register_descriptor(ring_);
    }
    ~Ring() {
        forget_descriptor(ring_);
        ::io_uring_queue_exit(&ring_);
    }
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    io_uring* get() noexcept { return &ring_; }

    // Errors of io_uring_enter that pass by themselves.
    static bool is_transient(int error) noexcept { return error == EINTR || error == EAGAIN || error == EBUSY; }

private:
#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_DEFER_TASKRUN)
    static constexpr unsigned kDeferring = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;  // Linux 6.1
#else
    static constexpr unsigned kDeferring = ~0u;  // refused
#endif

    // Spare the kernel looking up the descriptor at each call, which costs the more the more threads the process has. liburing
    // has it since 2.2, Linux since 5.18; older ones work without.
    template <class R>
    void register_descriptor(R& ring) {
        if constexpr (requires { io_uring_register_ring_fd(&ring); }) {
            flags_before_ = ring.int_flags;
            io_uring_register_ring_fd(&ring);
        }
    }

    // The registration is the creating thread's, and ends with it. On another thread liburing would undo that one's registration:
    // so make it forget that there is one.
    template <class R>
    void forget_descriptor(R& ring) noexcept {
        if constexpr (requires { io_uring_register_ring_fd(&ring); }) {
            if (std::this_thread::get_id() == owner_) return;
            ring.int_flags = static_cast<decltype(ring.int_flags)>(flags_before_);
            ring.enter_ring_fd = ring.ring_fd;
        }
    }

    io_uring ring_;
    unsigned flags_before_ = 0;
    const std::thread::id owner_ = std::this_thread::get_id();
};

// Fill in the submission entry; the caller sets its user_data.
inline void prepare(io_uring_sqe* sqe, const Operation& operation) noexcept {
    switch (operation.kind) {
        case Operation::Kind::read:
            ::io_uring_prep_read(sqe, operation.fd, operation.memory, operation.length, operation.offset);
            break;
        case Operation::Kind::write:
            ::io_uring_prep_write(sqe, operation.fd, operation.memory, operation.length, operation.offset);
            break;
        case Operation::Kind::sync: ::io_uring_prep_fsync(sqe, operation.fd, 0); break;
    }
}

}  // namespace deepnvme
