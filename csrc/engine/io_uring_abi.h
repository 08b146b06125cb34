// What the kernel and a process tell each other through an io_uring (Linux 5.1 and later; io_uring_setup(2), io_uring_enter(2)).
// Written down here rather than taken from linux/io_uring.h, since a distribution's header may be older than the kernel that runs,
// and the op is compiled on one machine for others. Only what is used.
#pragma once

#include <cstdint>

namespace deepnvme::io_uring {

// System calls; the same numbers on every architecture but alpha.
constexpr long kSetup = 425, kEnter = 426, kRegister = 427;

struct Submission {
    std::uint8_t opcode;
    std::uint8_t flags;
    std::uint16_t priority;
    std::int32_t fd;
    std::uint64_t offset;
    std::uint64_t address;
    std::uint32_t length;
    std::uint32_t operation_flags;  // of a poll: its events; big-endian machines swap the 16-bit halves
    std::uint64_t user_data;
    std::uint64_t unused[3];
};
static_assert(sizeof(Submission) == 64);

struct Completion {
    std::uint64_t user_data;
    std::int32_t result;
    std::uint32_t flags;
};
static_assert(sizeof(Completion) == 16);

// Opcodes.
constexpr std::uint8_t kFsync = 3, kPollAdd = 6, kAsyncCancel = 14, kRead = 22, kWrite = 23;

struct SubmissionOffsets {
    std::uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, unused;
    std::uint64_t user_address;
};
struct CompletionOffsets {
    std::uint32_t head, tail, ring_mask, ring_entries, overflow, completions, flags, unused;
    std::uint64_t user_address;
};
struct Parameters {
    std::uint32_t submissions, completions, flags, sq_thread_cpu, sq_thread_idle, features, workqueue_fd, unused[3];
    SubmissionOffsets submission_offsets;
    CompletionOffsets completion_offsets;
};
static_assert(sizeof(Parameters) == 120);

// Of Parameters::flags.
constexpr std::uint32_t kPolled = 1u << 0;         // completions are polled for; direct transfers only
constexpr std::uint32_t kCooperative = 1u << 8;    // Linux 5.19: a completion does not interrupt the thread
constexpr std::uint32_t kSingleIssuer = 1u << 12;  // Linux 6.0: one thread submits
constexpr std::uint32_t kDeferring = 1u << 13;     // Linux 6.1: completions come when the thread waits for some
// Of Parameters::features.
constexpr std::uint32_t kOneMapping = 1u << 0;  // Linux 5.4: both rings are in one mapping

// Offsets of mmap.
constexpr std::int64_t kRings = 0, kSubmissions = 0x10000000;

// Of the submission ring's flags, which the kernel sets.
constexpr std::uint32_t kOverflown = 1u << 1, kHasWork = 1u << 2;
// Of io_uring_enter.
constexpr std::uint32_t kGetEvents = 1u << 0, kRegisteredRing = 1u << 4;

// Operations of io_uring_register.
constexpr std::uint32_t kProbe = 8, kRegisterRings = 20, kUnregisterRings = 21;

struct RingUpdate {
    std::uint32_t offset;
    std::uint32_t unused;
    std::uint64_t fd;
};

struct Probe {
    struct Operation {
        std::uint8_t opcode, unused;
        std::uint16_t flags;  // bit 0: the kernel has it
        std::uint32_t also_unused;
    };
    std::uint8_t last_opcode, count;
    std::uint16_t unused;
    std::uint32_t also_unused[3];
    Operation operations[256];
};
static_assert(sizeof(Probe) == 16 + 256 * 8);

}  // namespace deepnvme::io_uring
