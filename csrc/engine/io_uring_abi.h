// Structures and constants of io_uring's system calls, io_uring_setup(2), io_uring_enter(2) and io_uring_register(2): only what is
// used, under names like the kernel's. Written down here rather than taken from linux/io_uring.h, since the header of the machine
// that compiles may be older than the kernel that runs the op.
#pragma once

#include <cstdint>

namespace deepnvme::io_uring {

// System calls; the same numbers on every architecture but alpha.
constexpr long kSysSetup = 425, kSysEnter = 426, kSysRegister = 427;

struct SubmissionEntry {
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
static_assert(sizeof(SubmissionEntry) == 64);

struct CompletionEntry {
    std::uint64_t user_data;
    std::int32_t result;
    std::uint32_t flags;
};
static_assert(sizeof(CompletionEntry) == 16);

// IORING_OP_*
constexpr std::uint8_t kOpFsync = 3, kOpPollAdd = 6, kOpAsyncCancel = 14, kOpRead = 22, kOpWrite = 23;

struct SubmissionOffsets {
    std::uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, unused;
    std::uint64_t user_address;
};
struct CompletionOffsets {
    std::uint32_t head, tail, ring_mask, ring_entries, overflow, completions, flags, unused;
    std::uint64_t user_address;
};
struct Parameters {
    std::uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, workqueue_fd, unused[3];
    SubmissionOffsets submission_offsets;
    CompletionOffsets completion_offsets;
};
static_assert(sizeof(Parameters) == 120);

// IORING_SETUP_*, of Parameters::flags
constexpr std::uint32_t kSetupCoopTaskrun = 1u << 8;    // Linux 5.19: a completion does not interrupt the thread
constexpr std::uint32_t kSetupSingleIssuer = 1u << 12;  // Linux 6.0: only one thread submits
constexpr std::uint32_t kSetupDeferTaskrun = 1u << 13;  // Linux 6.1: completions are posted when the thread waits for some
// IORING_FEAT_*, of Parameters::features
constexpr std::uint32_t kFeatSingleMmap = 1u << 0;  // Linux 5.4: one mapping has both rings

// IORING_OFF_SQ_RING, IORING_OFF_SQES: offsets of mmap
constexpr std::int64_t kOffRings = 0, kOffSubmissions = 0x10000000;

// IORING_SQ_*, of the submission ring's flags, which the kernel sets
constexpr std::uint32_t kSqCompletionOverflow = 1u << 1, kSqTaskrun = 1u << 2;
// IORING_ENTER_*
constexpr std::uint32_t kEnterGetEvents = 1u << 0, kEnterRegisteredRing = 1u << 4;

// IORING_REGISTER_*, IORING_UNREGISTER_*
constexpr std::uint32_t kRegisterProbe = 8, kRegisterRingFds = 20, kUnregisterRingFds = 21;
// IO_URING_OP_SUPPORTED, of Probe::Operation::flags
constexpr std::uint16_t kOpSupported = 1u << 0;

struct RingUpdate {
    std::uint32_t offset;
    std::uint32_t unused;
    std::uint64_t fd;
};

struct Probe {
    struct Operation {
        std::uint8_t opcode, unused;
        std::uint16_t flags;
        std::uint32_t also_unused;
    };
    std::uint8_t last_opcode, count;
    std::uint16_t unused;
    std::uint32_t also_unused[3];
    Operation operations[256];
};
static_assert(sizeof(Probe) == 16 + 256 * 8);

}  // namespace deepnvme::io_uring
