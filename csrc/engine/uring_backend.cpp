#include "engine/uring_backend.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "core/error.h"

namespace deepnvme {

namespace {

// user_data of completions that are no operation's. An operation's is its index, and in the high half a number of its own: a cancel
// that comes late does not hit a later operation of the same index.
constexpr std::uint64_t kWake = ~std::uint64_t{1};
constexpr std::uint64_t kCancel = ~std::uint64_t{2};

}  // namespace

// One entry more than operations is for the poll that listens for wake(). The kernel makes the completion queue twice as long, with
// room for the completion of a cancel beside each operation's.
UringBackend::UringBackend(unsigned capacity) : under_way_by_index_(capacity), ring_(capacity + 1) {
    require_operations();
    listen();
    // A seccomp filter or an older kernel may allow io_uring_setup and refuse the rest: found out now.
    const int submitted = ring_.submit(0, /*get_events=*/true);
    if (submitted < 0) throw IoError(-submitted, "io_uring_enter", "");
    int refused = 0;
    ring_.collect([&](const io_uring::CompletionEntry& first) {
        refused = std::max(0, -first.result);
        return false;  // stays in the ring: if it is no error, the first reap handles it
    });
    if (refused) throw IoError(refused, "io_uring poll", "");
}

std::size_t UringBackend::submit(std::span<Operation* const> operations) {
    std::size_t taken = 0;
    for (Operation* operation : operations) {
        io_uring::SubmissionEntry* next = entry();
        if (!next) break;
        prepare(*next, *operation);
        next->user_data = std::uint64_t{++sequence_} << 32 | operation->index;
        under_way_by_index_[operation->index] = {operation, next->user_data};
        ++taken;
    }
    under_way_ += taken;
    return taken;
}

void UringBackend::flush() {
    if (!listening_ && poll_error_ == 0) listen();
    ring_.submit();
    if (ring_.error()) throw IoError(ring_.error(), "io_uring_enter", "");
}

std::size_t UringBackend::reap(std::span<Completion> completions) {
    const bool sound = ring_.error() == 0 && poll_error_ == 0;
    const std::size_t count = sound ? wait(completions) : 0;
    if (count > 0) return count;  // an error is told when there is nothing else to tell
    if (ring_.error()) throw IoError(ring_.error(), "io_uring_enter", "");
    if (poll_error_) throw IoError(poll_error_, "io_uring poll", "");
    return 0;
}

bool UringBackend::cancel(Operation& operation) noexcept {
    const UnderWay& found = under_way_by_index_[operation.index];
    if (found.operation != &operation) return true;
    io_uring::SubmissionEntry* next = entry();
    if (!next) return false;
    next->opcode = io_uring::kOpAsyncCancel;
    next->fd = -1;
    next->address = found.user_data;
    next->user_data = kCancel;
    return true;
}

bool UringBackend::stop() noexcept {
    for (const UnderWay& each : under_way_by_index_)
        if (each.operation) cancel(*each.operation);
    ring_.forget_error();
    std::array<Completion, 16> ended;
    while (under_way_ > 0 && ring_.error() == 0) wait(ended);
    return under_way_ == 0;
}

// Block as reap() does. Returns how many operations ended. Throws nothing: errors are kept for the next flush or reap.
std::size_t UringBackend::wait(std::span<Completion> completions) noexcept {
    if (!listening_ && poll_error_ == 0) listen();
    const bool at_hand = ring_.ready() > 0 && ring_.queued() == 0;
    const int entered = at_hand ? 0 : ring_.submit(/*wait_for=*/1);
    std::size_t count = 0;
    const unsigned seen = ring_.collect([&](const io_uring::CompletionEntry& ended) {
        if (ended.user_data == kWake) {
            woken(ended.result);
        } else if (ended.user_data != kCancel) {
            if (count == completions.size()) return false;
            UnderWay& found = under_way_by_index_[static_cast<std::uint32_t>(ended.user_data)];
            completions[count++] = {std::exchange(found.operation, nullptr), ended.result};
        }
        return true;
    });
    under_way_ -= count;
    // The kernel is short of memory and nothing is under way that would end the shortage: don't spin on it.
    if (!ring_.error() && entered < 0 && entered != -EINTR && seen == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    return count;
}

// Linux 5.1 has io_uring, 5.6 the reads and writes used here.
void UringBackend::require_operations() {
    if (!ring_.supports({io_uring::kOpRead, io_uring::kOpWrite, io_uring::kOpFsync}))
        throw IoError(EOPNOTSUPP, "io_uring read and write (Linux 5.6 has them)", "");
}

// A free entry; null if the queue stays full after a submit. The last is reserved for the poll of wake().
io_uring::SubmissionEntry* UringBackend::entry() noexcept {
    if (ring_.space_left() < 2) ring_.submit();
    return ring_.space_left() < 2 ? nullptr : ring_.next_entry();
}

// Queue a poll of the wake event. It fires once, so wait() and flush() queue the next.
void UringBackend::listen() noexcept {
    io_uring::SubmissionEntry* next = ring_.next_entry();
    if (!next) return;
    constexpr std::uint32_t kEvents = POLLIN;
    next->opcode = io_uring::kOpPollAdd;
    next->fd = event_.fd();
    next->operation_flags = std::endian::native == std::endian::big ? std::rotl(kEvents, 16) : kEvents;
    next->user_data = kWake;
    listening_ = true;
}

void UringBackend::woken(int result) noexcept {
    listening_ = false;
    event_.clear();
    if (result < 0) poll_error_ = -result;
}

std::unique_ptr<Backend> make_uring_backend(unsigned capacity) { return std::make_unique<UringBackend>(capacity); }

}  // namespace deepnvme
