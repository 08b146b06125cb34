// What a fork does to objects that own threads.
#pragma once

#include <cstdint>

namespace deepnvme {

// Differs between a process and its forked children; remembered by what cannot be used on the other side of a fork. Cheaper than
// getpid, which is a system call.
std::uint64_t process_generation() noexcept;

}  // namespace deepnvme
