// Copying in bulk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace deepnvme {

// memcpy that leaves the destination out of the processor's cache where it is large. Of reads, what the drive has just put there,
// and the copy has yet to read, stays: staged reads of 1 GiB went from 0.83 to 0.95 of those in place. Of writes, more is staged
// than the cache holds: the copy took 55 ms a GiB rather than 80 while the drive fetched other blocks from memory.
void copy_past_cache(std::byte* to, const std::byte* from, std::size_t size) noexcept;

// Copy sizes[i] bytes from the address from[i] to the address to[i], for each i; the spans are of one length. No range that is
// written to overlaps another. Where there is enough to copy, threads help until this returns: see copy_threads(). Throws
// std::bad_alloc.
void copy_many(std::span<const std::uint64_t> to, std::span<const std::uint64_t> from, std::span<const std::uint64_t> sizes);

// How many threads copy so many bytes, the caller's among them: one for each processor that the process may use, at most 8, and none
// for less than 8 MiB.
std::size_t copy_threads(std::uint64_t bytes, std::size_t processors) noexcept;

}  // namespace deepnvme
