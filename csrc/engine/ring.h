// An io_uring instance, by the kernel's own interface. It is used by the thread that makes it, and may be destroyed by any.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <thread>
#include <utility>

#include "core/fd.h"
#include "engine/backend.h"
#include "engine/io_uring_abi.h"

namespace deepnvme {

class Ring {
public:
    // `defer`: whether completions may be held back until the thread waits for some. `extra_flags`: further set-up flags. Throws
    // IoError.
    explicit Ring(unsigned entries, bool defer = true, unsigned extra_flags = 0);
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // Whether the kernel has an operation. False where it cannot tell (before Linux 5.6).
    bool supports(std::initializer_list<std::uint8_t> opcodes) const noexcept;

    // An empty entry, which goes out with the next submission; null if the queue is full.
    io_uring::Submission* entry() noexcept {
        if (space_left() == 0) return nullptr;
        io_uring::Submission* found = &submissions_[tail_++ & submission_mask_];
        std::memset(found, 0, sizeof *found);
        return found;
    }

    // Entries that the kernel has not taken, and how many more there may be.
    unsigned queued() const noexcept { return tail_ - __atomic_load_n(kernel_head_, __ATOMIC_ACQUIRE); }
    unsigned space_left() const noexcept { return entries_ - queued(); }

    // Completions that are at hand.
    unsigned ready() const noexcept {
        return __atomic_load_n(completion_tail_, __ATOMIC_ACQUIRE) - __atomic_load_n(completion_head_, __ATOMIC_RELAXED);
    }

    // Submit what is queued, and block until `wait_for` completions are at hand. With `look`, the kernel looks for completions even
    // if there is nothing to wait for. Returns how many entries it took, or -errno.
    int submit(unsigned wait_for = 0, bool look = false) noexcept;

    // Hand each completion at hand to `take`, oldest first, until that returns false: such a one stays. Returns how many were taken.
    template <class Take>
    unsigned collect(Take&& take) noexcept {
        const unsigned first = __atomic_load_n(completion_head_, __ATOMIC_RELAXED);
        const unsigned tail = __atomic_load_n(completion_tail_, __ATOMIC_ACQUIRE);
        unsigned head = first;
        while (head != tail && take(completions_[head & completion_mask_])) ++head;
        __atomic_store_n(completion_head_, head, __ATOMIC_RELEASE);
        return head - first;
    }

    // Errors of submit that pass by themselves.
    static bool is_transient(int error) noexcept { return error == EINTR || error == EAGAIN || error == EBUSY; }

private:
    // Memory that is shared with the kernel, and with no forked child: that must not be able to disturb its parent's.
    class Mapping {
    public:
        Mapping() noexcept = default;
        Mapping(int fd, std::size_t size, std::int64_t offset);  // throws IoError
        Mapping(Mapping&& other) noexcept { *this = std::move(other); }
        Mapping& operator=(Mapping&& other) noexcept {
            std::swap(address_, other.address_);
            std::swap(size_, other.size_);
            return *this;
        }
        ~Mapping();

        template <class T>
        T* at(std::uint64_t offset) const noexcept {
            return reinterpret_cast<T*>(address_ + offset);
        }

    private:
        std::byte* address_ = nullptr;
        std::size_t size_ = 0;
    };

    void map(const io_uring::Parameters& parameters);
    void register_descriptor() noexcept;

    Fd fd_;
    Mapping rings_, submission_memory_;
    std::uint32_t flags_ = 0;
    io_uring::Submission* submissions_ = nullptr;
    unsigned entries_ = 0, submission_mask_ = 0, completion_mask_ = 0;
    unsigned tail_ = 0;  // of what was queued; the kernel sees it with the next submission
    const unsigned* kernel_head_ = nullptr;
    unsigned* kernel_tail_ = nullptr;
    const unsigned* kernel_flags_ = nullptr;
    unsigned* completion_head_ = nullptr;
    const unsigned* completion_tail_ = nullptr;
    const io_uring::Completion* completions_ = nullptr;
    int registered_ = -1;  // the descriptor's number among the thread's registered ones
    const std::thread::id owner_ = std::this_thread::get_id();
};

// Fill in the submission entry; the caller sets its user_data.
inline void prepare(io_uring::Submission& entry, const Operation& operation) noexcept {
    entry.fd = operation.fd;
    if (operation.kind == Operation::Kind::sync) {
        entry.opcode = io_uring::kFsync;
        return;
    }
    entry.opcode = operation.kind == Operation::Kind::read ? io_uring::kRead : io_uring::kWrite;
    entry.address = reinterpret_cast<std::uintptr_t>(operation.memory);
    entry.length = static_cast<std::uint32_t>(operation.length);
    entry.offset = operation.offset;
}

}  // namespace deepnvme
