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
    const int submitted = ring_.submit(0, /*look=*/true);
    if (submitted < 0) throw IoError(-submitted, "io_uring_enter", "");
    int refused = 0;
    ring_.collect([&](const io_uring::Completion& first) {
        refused = std::max(0, -first.result);
        return false;  // what is no error is told to the first reap
    });
    if (refused) throw IoError(refused, "io_uring poll", "");
}

std::size_t UringBackend::submit(std::span<Operation* const> operations) {
    std::size_t taken = 0;
    for (Operation* operation : operations) {
        io_uring::Submission* next = entry();
        if (!next) break;
        prepare(*next, *operation);
        next->user_data = std::uint64_t{++taken_} << 32 | operation->index;
        under_way_by_index_[operation->index] = {operation, next->user_data};
        ++taken;
    }
    under_way_ += taken;
    return taken;
}

void UringBackend::flush() {
    if (!listening_ && poll_error_ == 0) listen();
    note_error(ring_.submit());
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
    io_uring::Submission* next = entry();
    if (!next) return false;
    next->opcode = io_uring::kAsyncCancel;
    next->fd = -1;
    next->address = found.tag;
    next->user_data = kCancel;
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
    const bool at_hand = ready() && ring_.queued() == 0;
    const int entered = at_hand ? 0 : ring_.submit(/*wait_for=*/1);
    std::size_t count = 0;
    const unsigned seen = ring_.collect([&](const io_uring::Completion& ended) {
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
    note_error(entered);
    // The kernel is short of memory and nothing is under way that would end the shortage: don't spin on it.
    if (!enter_error_ && entered < 0 && entered != -EINTR && seen == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    return count;
}

// Linux 5.1 has io_uring, 5.6 the reads and writes used here.
void UringBackend::require_operations() {
    if (!ring_.supports({io_uring::kRead, io_uring::kWrite, io_uring::kFsync}))
        throw IoError(EOPNOTSUPP, "io_uring read and write (Linux 5.6 has them)", "");
}

// Told by the next flush or reap. The kernel says only once that it has lost a completion (EBADR).
void UringBackend::note_error(int entered) noexcept {
    if (entered < 0 && !Ring::is_transient(-entered)) enter_error_ = -entered;
}

// Null while the kernel takes nothing. The last is left to the poll.
io_uring::Submission* UringBackend::entry() noexcept {
    if (ring_.space_left() < 2) note_error(ring_.submit());
    return ring_.space_left() < 2 ? nullptr : ring_.entry();
}

// Goes out with the next submission.
void UringBackend::listen() noexcept {
    io_uring::Submission* next = ring_.entry();
    if (!next) return;
    constexpr std::uint32_t kEvents = POLLIN;
    next->opcode = io_uring::kPollAdd;
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
