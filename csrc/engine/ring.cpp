#include "engine/ring.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "core/error.h"

namespace deepnvme {

namespace {

}  // namespace

Ring::Mapping::Mapping(int fd, std::size_t size, std::int64_t offset) {
    void* mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
    if (mapped == MAP_FAILED) throw IoError(errno, "mmap of an io_uring", "");
    address_ = static_cast<std::byte*>(mapped);
    size_ = size;
    ::madvise(mapped, size, MADV_DONTFORK);
}

Ring::Mapping::~Mapping() {
    if (address_) ::munmap(address_, size_);
}

Ring::Ring(unsigned entries) {
    // One thread submits and reaps, so completions need not interrupt it: they come with its next system call, or when it
    // waits. The best first; a kernel says EINVAL to what it does not know. Why this order: docs/engine.md.
    constexpr std::array kSetUps{io_uring::kSetupSingleIssuer | io_uring::kSetupDeferTaskrun,
                                 io_uring::kSetupSingleIssuer | io_uring::kSetupCoopTaskrun, io_uring::kSetupCoopTaskrun, 0u};
    io_uring::Parameters parameters;
    int error = EINVAL;
    for (const std::uint32_t flags : kSetUps) {
        parameters = {};
        parameters.flags = flags;
        const long fd = ::syscall(io_uring::kSysSetup, entries, &parameters);
        error = fd < 0 ? errno : 0;
        fd_ = Fd(static_cast<int>(fd));
        if (error != EINVAL) break;
    }
    if (error) throw IoError(error, "io_uring_setup", "");
    if (!(parameters.features & io_uring::kFeatSingleMmap))
        throw IoError(EOPNOTSUPP, "io_uring with one mapping (Linux 5.4 has it)", "");
    map(parameters);
    register_descriptor();
}

Ring::~Ring() {
    // Registered descriptors belong to a thread and end with it. On another thread this would unregister one of that thread's.
    if (registered_ < 0 || std::this_thread::get_id() != owner_) return;
    io_uring::RingUpdate update{static_cast<std::uint32_t>(registered_), 0, 0};
    ::syscall(io_uring::kSysRegister, fd_.get(), io_uring::kUnregisterRingFds, &update, 1);
}

void Ring::map(const io_uring::Parameters& parameters) {
    const io_uring::SubmissionOffsets& submissions = parameters.submission_offsets;
    const io_uring::CompletionOffsets& completions = parameters.completion_offsets;
    const std::size_t end_of_array = submissions.array + std::size_t{parameters.sq_entries} * sizeof(unsigned);
    const std::size_t end_of_completions =
        completions.completions + std::size_t{parameters.cq_entries} * sizeof(io_uring::CompletionEntry);
    rings_ = Mapping(fd_.get(), std::max(end_of_array, end_of_completions), io_uring::kOffRings);
    submission_memory_ =
        Mapping(fd_.get(), std::size_t{parameters.sq_entries} * sizeof(io_uring::SubmissionEntry), io_uring::kOffSubmissions);

    submissions_ = submission_memory_.at<io_uring::SubmissionEntry>(0);
    entries_ = parameters.sq_entries;
    submission_mask_ = *rings_.at<unsigned>(submissions.ring_mask);
    kernel_head_ = rings_.at<unsigned>(submissions.head);
    kernel_tail_ = rings_.at<unsigned>(submissions.tail);
    kernel_flags_ = rings_.at<unsigned>(submissions.flags);
    // The kernel finds entries by their numbers. Here each is always at its own place.
    for (unsigned i = 0; i < entries_; ++i) rings_.at<unsigned>(submissions.array)[i] = i;

    completion_head_ = rings_.at<unsigned>(completions.head);
    completion_tail_ = rings_.at<unsigned>(completions.tail);
    completion_mask_ = *rings_.at<unsigned>(completions.ring_mask);
    completions_ = rings_.at<io_uring::CompletionEntry>(completions.completions);
}

// Spare the kernel looking up the descriptor at each call, which costs the more the more threads the process has. Linux has it
// since 5.18; older ones work without.
void Ring::register_descriptor() noexcept {
    io_uring::RingUpdate update{~0u, 0, static_cast<std::uint64_t>(fd_.get())};
    if (::syscall(io_uring::kSysRegister, fd_.get(), io_uring::kRegisterRingFds, &update, 1) == 1)
        registered_ = static_cast<int>(update.offset);
}

bool Ring::supports(std::initializer_list<std::uint8_t> opcodes) const noexcept {
    io_uring::Probe probe{};
    const long asked =
        ::syscall(io_uring::kSysRegister, fd_.get(), io_uring::kRegisterProbe, &probe, std::size(probe.operations));
    return asked >= 0 && std::all_of(opcodes.begin(), opcodes.end(), [&](std::uint8_t opcode) {
        return probe.operations[opcode].flags & io_uring::kOpSupported;
    });
}

int Ring::submit(unsigned wait_for, bool get_events) noexcept {
    const unsigned count = queued();
    __atomic_store_n(kernel_tail_, tail_, __ATOMIC_RELEASE);
    // The kernel posts completions that overflowed or were deferred only when asked for events.
    constexpr std::uint32_t kHeldBack = io_uring::kSqCompletionOverflow | io_uring::kSqTaskrun;
    const bool held_back = __atomic_load_n(kernel_flags_, __ATOMIC_RELAXED) & kHeldBack;
    get_events = get_events || wait_for > 0 || held_back;
    if (count == 0 && !get_events) return 0;
    const bool registered = registered_ >= 0;
    const unsigned flags = (get_events ? io_uring::kEnterGetEvents : 0) | (registered ? io_uring::kEnterRegisteredRing : 0);
    const long entered =
        ::syscall(io_uring::kSysEnter, registered ? registered_ : fd_.get(), count, wait_for, flags, nullptr, std::size_t{0});
    if (entered >= 0) return static_cast<int>(entered);
    const int failure = errno;
    if (failure != EINTR && failure != EAGAIN && failure != EBUSY) error_ = failure;
    return -failure;
}

}  // namespace deepnvme
