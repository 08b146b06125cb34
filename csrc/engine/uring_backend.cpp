#ifdef DEEPNVME_HAVE_LIBURING

#include "engine/uring_backend.h"

#include <poll.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "core/error.h"

namespace deepnvme {

namespace {

// Tags of completions that are no operation's. An operation's tag is its index, and above that a number that makes it unlike the
// tag of those before it: a cancel that comes late must not hit a later one.
constexpr std::uint64_t kWake = ~std::uint64_t{1};
constexpr std::uint64_t kCancel = ~std::uint64_t{2};

}  // namespace

// One entry more than operations: the poll that listens for wake(). Of completions there are twice as many as entries, which is
// enough for one of a cancel beside each operation's.
UringBackend::UringBackend(unsigned capacity, bool defer) : under_way_by_index_(capacity), ring_(capacity + 1, defer) {
    require_operations();
    listen();
    // An older kernel, or a filter, may allow the set-up and refuse the rest.
    const int submitted = ::io_uring_submit(ring_.get());
    if (submitted < 0) throw IoError(-submitted, "io_uring_enter", "");
    io_uring_cqe* cqe = nullptr;
    if (::io_uring_peek_cqe(ring_.get(), &cqe) == 0 && cqe->res < 0) throw IoError(-cqe->res, "io_uring poll", "");
}

std::size_t UringBackend::submit(std::span<Operation* const> operations) {
    std::size_t taken = 0;
    for (Operation* operation : operations) {
        io_uring_sqe* sqe = entry();
        if (!sqe) break;
        prepare(sqe, *operation);
        sqe->user_data = std::uint64_t{++taken_} << 32 | operation->index;
        under_way_by_index_[operation->index] = {operation, sqe->user_data};
        ++taken;
    }
    under_way_ += taken;
    return taken;
}

void UringBackend::flush() {
    if (!listening_ && poll_error_ == 0) listen();
    note_error(::io_uring_submit(ring_.get()));
    if (enter_error_) throw IoError(enter_error_, "io_uring_enter", "");
}

std::size_t UringBackend::reap(std::span<Completion> completions) {
    const bool sound = enter_error_ == 0 && poll_error_ == 0;
    const std::size_t count = sound ? wait(completions) : 0;
    if (count > 0) return count;  // an error is told when there is nothing else to tell
    if (enter_error_) throw IoError(enter_error_, "io_uring_enter", "");
    if (poll_error_) throw IoError(poll_error_, "io_uring poll", "");
    return 0;
}

bool UringBackend::cancel(Operation& operation) noexcept {
    const UnderWay& found = under_way_by_index_[operation.index];
    if (found.operation != &operation) return true;
    io_uring_sqe* sqe = entry();
    if (!sqe) return false;
    ::io_uring_prep_rw(IORING_OP_ASYNC_CANCEL, sqe, -1, nullptr, 0, 0);
    sqe->addr = found.tag;
    sqe->user_data = kCancel;
    return true;
}

bool UringBackend::stop() noexcept {
    for (const UnderWay& each : under_way_by_index_)
        if (each.operation) cancel(*each.operation);
    if (enter_error_ != EBADR) enter_error_ = 0;  // EBADR: a completion is lost, and nobody could wait for it
    std::array<Completion, 16> ended;
    while (under_way_ > 0 && enter_error_ == 0) wait(ended);
    return under_way_ == 0;
}

// Block as reap does; return how many operations ended, and note errors. All that is taken from the ring is accounted for.
std::size_t UringBackend::wait(std::span<Completion> completions) noexcept {
    if (!listening_ && poll_error_ == 0) listen();
    const bool at_hand = ready() && ::io_uring_sq_ready(ring_.get()) == 0;
    const int entered = at_hand ? 0 : ::io_uring_submit_and_wait(ring_.get(), 1);
    std::size_t count = 0;
    unsigned head, seen = 0;
    io_uring_cqe* cqe;
    io_uring_for_each_cqe(ring_.get(), head, cqe) {
        if (cqe->user_data == kWake) {
            woken(cqe->res);
        } else if (cqe->user_data != kCancel) {
            if (count == completions.size()) break;
            UnderWay& ended = under_way_by_index_[static_cast<std::uint32_t>(cqe->user_data)];
            completions[count++] = {std::exchange(ended.operation, nullptr), cqe->res};
        }
        ++seen;
    }
    ::io_uring_cq_advance(ring_.get(), seen);
    under_way_ -= count;
    note_error(entered);
    // The kernel is short of memory and nothing is under way that would end the shortage: don't spin on it.
    if (!enter_error_ && entered < 0 && entered != -EINTR && seen == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    return count;
}

// Linux 5.1 has io_uring, 5.6 the reads and writes used here.
void UringBackend::require_operations() {
    io_uring_probe* probe = ::io_uring_get_probe_ring(ring_.get());
    const bool has_all = probe && ::io_uring_opcode_supported(probe, IORING_OP_READ) &&
                         ::io_uring_opcode_supported(probe, IORING_OP_WRITE) &&
                         ::io_uring_opcode_supported(probe, IORING_OP_FSYNC);
    ::io_uring_free_probe(probe);
    if (!has_all) throw IoError(EOPNOTSUPP, "io_uring read and write (Linux 5.6 has them)", "");
}

// Told by the next flush or reap. The kernel says only once that it has lost a completion (EBADR).
void UringBackend::note_error(int entered) noexcept {
    if (entered < 0 && !Ring::is_transient(-entered)) enter_error_ = -entered;
}

// Null while the kernel takes nothing. The last is left to the poll.
io_uring_sqe* UringBackend::entry() noexcept {
    if (::io_uring_sq_space_left(ring_.get()) < 2) note_error(::io_uring_submit(ring_.get()));
    return ::io_uring_sq_space_left(ring_.get()) < 2 ? nullptr : ::io_uring_get_sqe(ring_.get());
}

// Goes out with the next submission.
void UringBackend::listen() noexcept {
    io_uring_sqe* sqe = ::io_uring_get_sqe(ring_.get());
    if (!sqe) return;
    ::io_uring_prep_poll_add(sqe, event_.fd(), POLLIN);
    sqe->user_data = kWake;
    listening_ = true;
}

void UringBackend::woken(int result) noexcept {
    listening_ = false;
    event_.clear();
    if (result < 0) poll_error_ = -result;
}

std::unique_ptr<Backend> make_uring_backend(unsigned capacity) { return std::make_unique<UringBackend>(capacity); }

}  // namespace deepnvme

#endif
