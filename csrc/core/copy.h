// Copying what will not be read again soon.
#pragma once

#include <cstddef>

namespace deepnvme {

// memcpy that leaves the destination out of the processor's cache where it is large: what the drive has just put there, and the
// copy has yet to read, stays. Staged reads of 1 GiB went from 0.83 to 0.95 of those in place.
void copy_past_cache(std::byte* to, const std::byte* from, std::size_t size) noexcept;

}  // namespace deepnvme
