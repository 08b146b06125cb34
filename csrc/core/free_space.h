// Whether a write fits into a file system, and the error of one that does not.
#pragma once

#include <cstdint>
#include <string>

#include "core/byte_range.h"
#include "core/error.h"

namespace deepnvme {

// The free space of the file system of an open file, as text, for a write of `needed` bytes that did not fit.
std::string free_space_text(int fd, std::uint64_t needed);

// The error of a write of which `needed` bytes did not fit.
IoError no_space(int fd, std::uint64_t needed, ByteRange write, const std::string& path);

// Throws no_space() if the file system has less than `needed` bytes free. To be asked before anything is reserved, so that a write
// that cannot fit doesn't take the last blocks from others while it finds out.
void check_free_space(int fd, std::uint64_t needed, ByteRange write, const std::string& path);

}  // namespace deepnvme
