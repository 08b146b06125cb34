// An io_uring instance, by its system calls. Only the thread that creates it may use it; any thread may destroy it.
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
    // `entries`: submissions that can be queued; the kernel rounds it up to a power of two. It may hold completions back until the
    // thread waits; ready() does not count those. Throws IoError where the kernel refuses.
    explicit Ring(unsigned entries);
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // Whether the kernel supports all of these opcodes. False before Linux 5.6, which cannot be asked.
    bool supports(std::initializer_list<std::uint8_t> opcodes) const noexcept;

    // An entry of zeros, which the next submit() submits; null if the queue is full. Does not block.
    io_uring::SubmissionEntry* next_entry() noexcept {
        if (space_left() == 0) return nullptr;
        io_uring::SubmissionEntry* found = &submissions_[tail_++ & submission_mask_];
        std::memset(found, 0, sizeof *found);
        return found;
    }

    // Entries that the kernel has not taken yet, and how many more can be queued.
    unsigned queued() const noexcept { return tail_ - __atomic_load_n(kernel_head_, __ATOMIC_ACQUIRE); }
    unsigned space_left() const noexcept { return entries_ - queued(); }

    // Completions that collect() can take without a system call.
    unsigned ready() const noexcept {
        return __atomic_load_n(completion_tail_, __ATOMIC_ACQUIRE) - __atomic_load_n(completion_head_, __ATOMIC_RELAXED);
    }

    // Submit the queued entries, then block until at least `wait_for` completions are ready; 0 does not block. `get_events`: post
    // completions that are held back, even if `wait_for` is 0. Returns how many were submitted, or -errno.
    int submit(unsigned wait_for = 0, bool get_events = false) noexcept;

    // Pass each ready completion to `take`, oldest first. One for which it returns false stays in the ring, and the rest with it.
    // Returns how many were taken.
    template <class Take>
    unsigned collect(Take&& take) noexcept {
        const unsigned first = __atomic_load_n(completion_head_, __ATOMIC_RELAXED);
        const unsigned tail = __atomic_load_n(completion_tail_, __ATOMIC_ACQUIRE);
        unsigned head = first;
        while (head != tail && take(completions_[head & completion_mask_])) ++head;
        __atomic_store_n(completion_head_, head, __ATOMIC_RELEASE);
        return head - first;
    }

    // The lasting error of submit(), as errno; 0 if there was none. Those that pass by themselves are not kept.
    int error() const noexcept { return error_; }
    // Forget the error before a last wait. EBADR stays: the kernel has lost a completion, and says so only once.
    void forget_error() noexcept {
        if (error_ != EBADR) error_ = 0;
    }

private:
    // Memory shared with the kernel. Not inherited by a forked child, whose writes would corrupt the parent's ring.
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
    int error_ = 0;
    io_uring::SubmissionEntry* submissions_ = nullptr;
    unsigned entries_ = 0, submission_mask_ = 0, completion_mask_ = 0;
    unsigned tail_ = 0;  // entries queued since the start; the kernel sees it with the next submit()
    const unsigned* kernel_head_ = nullptr;
    unsigned* kernel_tail_ = nullptr;
    const unsigned* kernel_flags_ = nullptr;
    unsigned* completion_head_ = nullptr;
    const unsigned* completion_tail_ = nullptr;
    const io_uring::CompletionEntry* completions_ = nullptr;
    int registered_ = -1;  // the descriptor's number among the thread's registered ones
    const std::thread::id owner_ = std::this_thread::get_id();
};

// Fill in the submission entry; the caller sets its user_data.
inline void prepare(io_uring::SubmissionEntry& entry, const Operation& operation) noexcept {
    entry.fd = operation.fd;
    if (operation.kind == Operation::Kind::sync) {
        entry.opcode = io_uring::kOpFsync;
        return;
    }
    entry.opcode = operation.kind == Operation::Kind::read ? io_uring::kOpRead : io_uring::kOpWrite;
    entry.address = reinterpret_cast<std::uintptr_t>(operation.memory);
    entry.length = static_cast<std::uint32_t>(operation.length);
    entry.offset = operation.offset;
}

}  // namespace deepnvme
