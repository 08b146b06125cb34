// How one contiguous transfer meets the file's direct-I/O limits. No system call is made here, so that every case can be a row of
// a test table.
//
// The aligned body goes direct: in place when the memory is aligned too, else through staging. What is left at the two ends goes
// through the page cache. The border between them lies on a page (or file system block, where that is larger), not merely on a
// sector: a buffered write of part of a page reads and later writes back the whole page, and would undo a direct write to the rest.
//
// If all transfers of a file are whole sectors (Ownership::sectors), there is no such border, and nothing is left at the ends.
//
// If the file's pages each belong to one transfer (Ownership::pages), a transfer that begins on a page also owns the rest of its
// last page. That end then goes direct as well, padded to a page in staging: the page cache would lose what it fails to write back,
// and a later read would return the old bytes without an error.
//
// Blocks of device memory are no larger than a staging slot, whichever route they take.
#pragma once

#include <cstdint>
#include <optional>

#include "core/file.h"

namespace deepnvme {

enum class Route : std::uint8_t {
    zero_copy,  // direct, from or into the caller's memory
    staged,     // direct, through a copy
    padded,     // direct, through a copy of a whole page: a write pads it with zeros, a read drops the padding
    buffered,   // through the page cache
    gds,        // direct, between the drive and device memory
};

struct Transfer {
    std::uint64_t offset;      // bytes into the file
    std::uint64_t length;      // bytes
    std::uintptr_t address;    // of the caller's memory; only its alignment matters
    bool on_device = false;    // in device memory: every block is staged, unless gds is set
    bool gds = false;          // by a DeviceIo, whatever its alignment
    Ownership ownership = Ownership::bytes;  // as File::ownership()
};

struct BlockLimits {
    std::uint32_t block_size;    // bytes; at least 512
    std::uint32_t staging_size;  // bytes in one staging slot; a multiple of 4096
    std::uint32_t page_size;
};

// A part of the transfer that takes one route, to be cut into blocks.
struct Span {
    std::uint64_t begin;   // bytes into the file
    std::uint64_t end;
    std::uint32_t stride;  // blocks end where the file offset is a multiple of this, or at `end`
    Route route;

    bool operator==(const Span&) const = default;
};

// At most a head, a body and a tail, in the order of the file; together exactly the transfer.
struct Plan {
    Span spans[3];
    std::uint32_t count = 0;
};

Plan plan(const Transfer& transfer, const std::optional<DirectLimits>& direct, const BlockLimits& limits);

// Bytes from `offset`, which lies in `span`, to the end of its block.
constexpr std::uint32_t block_length(const Span& span, std::uint64_t offset) {
    const std::uint64_t to_stride = span.stride - offset % span.stride;
    const std::uint64_t to_end = span.end - offset;
    return static_cast<std::uint32_t>(to_stride < to_end ? to_stride : to_end);
}

}  // namespace deepnvme
