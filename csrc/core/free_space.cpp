#include "core/free_space.h"

#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>

namespace deepnvme {

namespace {

// Of a file system, in bytes.
struct FreeSpace {
    std::uint64_t free;      // for anybody
    std::uint64_t reserved;  // for root (ext4), or for the file system's own needs (ext4, btrfs)
};

// Nothing when the file system does not know.
std::optional<FreeSpace> free_space_of(int fd) {
    struct statvfs space;
    if (::fstatvfs(fd, &space) != 0 || space.f_blocks == 0) return std::nullopt;
    const auto available = std::min(space.f_bavail, space.f_bfree);
    return FreeSpace{available * space.f_frsize, (space.f_bfree - available) * space.f_frsize};
}

}  // namespace

std::string free_space_text(int fd, std::uint64_t needed) {
    const auto space = free_space_of(fd);
    if (!space) return "an unknown number of bytes free";
    std::string text = std::to_string(space->free) + " bytes free";
    if (space->free < needed && needed <= space->free + space->reserved)  // or it would not have fitted with that either
        text += ", and " + std::to_string(space->reserved) + " reserved for root or the file system";
    return text;
}

IoError no_space(int fd, std::uint64_t needed, ByteRange write, const std::string& path) {
    return IoError(ENOSPC,
                   "write of " + std::to_string(write.length) + " bytes at offset " + std::to_string(write.offset) + " (" +
                       free_space_text(fd, needed) + ")",
                   path);
}

void check_free_space(int fd, std::uint64_t needed, ByteRange write, const std::string& path) {
    const auto too_little = [fd, needed] {
        const auto space = free_space_of(fd);
        // Root may be given what is reserved: only the file system can say.
        return space && needed > space->free + (::geteuid() == 0 ? space->reserved : 0);
    };
    if (!too_little()) return;
    ::syncfs(fd);  // what was deleted may not have been given back yet (XFS)
    if (too_little()) throw no_space(fd, needed, write, path);
}

}  // namespace deepnvme
